"""The reader's progress: the source of every function or class that passed, one file each, in notebooks/.progress/.

MINIMIND_PROGRESS=off: neither read nor written.
"""

import __future__

import ast
import html
import inspect
import math
import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import einops
import torch
import torch.nn.functional as F
from torch import nn

import minimind_core as core

from ..files import write_text
from .checking import examine, run
from .framework import Exercise

# What a saved solution may use without importing it, as the notebooks' first cells do.
PROVIDED = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "nn": nn,
    "F": F,
    "math": math,
    "einops": einops,
    "rearrange": einops.rearrange,
    "reduce": einops.reduce,
    "repeat": einops.repeat,
    "einsum": einops.einsum,
    "core": core,
}


def switched_off() -> bool:
    return os.environ.get("MINIMIND_PROGRESS", "on").strip().lower() == "off"


def folder() -> Path | None:
    """notebooks/.progress: of the folder in which the kernel runs, else of the repository that holds this package."""
    here = Path.cwd()
    for notebooks in (here, here / "notebooks", Path(__file__).resolve().parents[2] / "notebooks"):
        if (notebooks / "00_start_here.ipynb").is_file():
            return notebooks / ".progress"
    return None


def path(exercise: Exercise) -> Path | None:
    place = folder()
    return place / f"{exercise.name}.py" if place else None


def save(exercise: Exercise, function: Callable) -> str:
    """Save a function that passed. Returns one sentence for the report: saved, or why not; empty when switched off."""
    if switched_off():
        return ""
    source = _source(function)
    if source is None:
        return "Not saved: Python finds no source text for it. Only a function or class written in a cell is saved."
    target = path(exercise)
    if target is None:
        return "Not saved: no notebooks folder is near. Start Jupyter in the project's folder to keep your progress."
    header = f"# {exercise.name}: passed. Written by exercises.check; exercises.reset() forgets it.\n"
    try:
        write_text(target, header + source)
    except OSError as error:
        return f"Not saved: notebooks/.progress cannot be written ({type(error).__name__})."
    _, problem = read(exercise)
    if problem:
        return f"Your tick is saved, but later notebooks will use the reference: {problem}"
    return "Saved: later notebooks can use your version."


def read(exercise: Exercise) -> tuple[Callable | None, str]:
    """The saved function, if it is there and still passes on its own; else None and the reason in one sentence."""
    place = path(exercise)
    if switched_off() or place is None or not place.is_file():
        return None, "you have not passed this exercise yet."
    names = {**PROVIDED, **exercise.provides}
    try:
        source = place.read_text(encoding="utf-8")
        name = _definition(source)
        code = compile(source, str(place), "exec", flags=__future__.annotations.compiler_flag)
        exec(code, names)
    except NameError as error:
        return None, f"your function needs `{error.name}`, which only its own notebook has. Put that inside it."
    except Exception as error:
        return None, f"the saved file cannot be read ({type(error).__name__}). Check the exercise again."
    function = names[name]
    for case in exercise.cases:
        error = run(exercise, function, case).error
        if isinstance(error, NameError):
            return None, f"your function needs `{error.name}`, which only its own notebook has. Put that inside it."
    if examine(exercise, function).passed:
        return function, ""
    return None, "your saved function does not pass on its own. Check the exercise again."


def load(exercise: Exercise) -> Callable:
    """The reader's own function if it was saved and still passes, else the reference. Prints which one it is."""
    if switched_off():
        return exercise.reference
    function, problem = read(exercise)
    if function is not None:
        print(f"{exercise.name}: your own version.")
        return function
    print(f"{exercise.name}: the reference; {problem}")
    return exercise.reference


def forget(exercises: list[Exercise]) -> int:
    """Delete the saved files of these exercises. Returns how many there were."""
    if switched_off():
        return 0
    places = [place for place in map(path, exercises) if place is not None and place.is_file()]
    for place in places:
        place.unlink()
    return len(places)


def state(exercise: Exercise) -> str:
    """ "passed", "not yet", or "unreadable" for a saved file that is no Python function."""
    place = path(exercise)
    if switched_off() or place is None or not place.is_file():
        return "not yet"
    try:
        _definition(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return "unreadable"
    return "passed"


@dataclass(frozen=True)
class ProgressMap:
    """The map of all exercises: rows of (exercise, title, state)."""

    rows: list[tuple[str, str, str]]

    @property
    def passed(self) -> int:
        return sum(state == "passed" for _, _, state in self.rows)

    @property
    def headline(self) -> str:
        return f"{self.passed} of {len(self.rows)} exercises passed"

    @property
    def _advice(self) -> str:
        broken = [name for name, _, state in self.rows if state == "unreadable"]
        return f"Unreadable: check it again, or exercises.reset({broken[0]!r})." if broken else ""

    def __repr__(self) -> str:
        wide = [max(len(row[i]) for row in self.rows) for i in (0, 1)]
        lines = [f"{_MARKS[s]}  {name:<{wide[0]}}  {title:<{wide[1]}}  {s}" for name, title, s in self.rows]
        return "\n".join([self.headline, *lines, *filter(None, [self._advice])])

    def _repr_html_(self) -> str:
        cell = "<td style='text-align:left'>{}</td>".format
        rows = "".join(
            "<tr>" + cell(f"<code>{name}</code>") + cell(html.escape(title)) + cell(f"{_MARKS[s]} {s}") + "</tr>"
            for name, title, s in self.rows
        )
        heads = "".join(f"<th style='text-align:left'>{h}</th>" for h in ("exercise", "what you write", "state"))
        advice = f"<p>{html.escape(self._advice)}</p>" if self._advice else ""
        return f"<p><strong>{self.headline}</strong></p><table><tr>{heads}</tr>{rows}</table>{advice}"


_MARKS = {"passed": "✓", "not yet": "·", "unreadable": "?"}


def _source(function: Callable) -> str | None:
    try:
        source = _class_source(function) if inspect.isclass(function) else inspect.getsource(function)
        source = textwrap.dedent(source)
        _definition(source)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return source


def _class_source(cls: type) -> str:
    """The text of a class, found through a method: before 3.13 Python finds none for a class written in a notebook."""
    method = next((value for value in vars(cls).values() if inspect.isfunction(value)), None)
    if method is None:
        raise ValueError("the class has no method of its own")
    lines, _ = inspect.findsource(method)
    line = method.__code__.co_firstlineno
    classes = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.ClassDef)]
    around = [node for node in classes if node.name == cls.__name__ and node.lineno <= line <= node.end_lineno]
    if not around:
        raise ValueError("the method does not stand in the text of its class")
    node = around[-1]
    return "".join(lines[node.lineno - 1 : node.end_lineno])


def _definition(source: str) -> str:
    """The name of the last function or class in the text. Raises ValueError or SyntaxError if there is none."""
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    if not names:
        raise ValueError("the text defines no function and no class")
    return names[-1]
