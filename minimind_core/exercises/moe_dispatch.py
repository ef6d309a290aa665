"""Exercises."""

EXERCISES = []
