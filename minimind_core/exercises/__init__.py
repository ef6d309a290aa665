"""Exercises that name the mistake.

    from minimind_core import exercises
    exercises.check("01_rmsnorm.rms_norm", rms_norm)    # compare your function with the reference
    exercises.progress()                                # the map: passed, not yet
    exercises.load("01_rmsnorm.rms_norm")               # your own function if it passed, else the reference
    exercises.reset()                                   # forget all of it

A bank is one module per notebook that holds a list EXERCISES; it is loaded when first asked for.
"""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import replace

from . import store
from .checking import examine
from .framework import Exercise
from .report import Report
from .store import ProgressMap

BANKS = {
    "00_start_here": "start_here",
    "01_rmsnorm": "rmsnorm",
    "02_rope": "rope",
    "03_yarn": "yarn",
    "04_attention_gqa": "attention",
    "05_kv_cache": "kv_cache",
    "06_swiglu": "swiglu",
    "07_residual_block": "residual_block",
    "08_moe_gate": "moe_gate",
    "09_moe_dispatch": "moe_dispatch",
    "10_tied_embeddings": "tied_embeddings",
    "11_shifted_cross_entropy": "cross_entropy",
    "12_the_whole_model": "whole_model",
    "13_tokenizer": "tokenizer",
    "14_training": "training",
    "15_generation": "generation",
}

OURS = (
    "This is the course's own function, not yours. Run the cell with your own code above (it begins with def or "
    "class), then this one again."
)


def check(name: str, function: Callable) -> Report:
    """Compare a reader's function with the reference of exercise `name`. A pass is saved (see `progress`).

    Returns a report; `.passed` is True or False. Never raises for what the function does.
    Raises ValueError for an unknown name.
    """
    exercise = get(name)
    if _is_ours(exercise, function):
        return Report(name, "not attempted yet", [OURS])
    report = examine(exercise, function)
    if not report.passed:
        return report
    note = store.save(exercise, function)
    return replace(report, paragraphs=[*report.paragraphs, note]) if note else report


def progress() -> ProgressMap:
    """The map of all exercises, with a tick and a word for each that was passed."""
    return ProgressMap([(e.name, e.title, store.state(e)) for e in map(get, names())])


def load(name: str) -> Callable:
    """The reader's own function of exercise `name` if it was saved and still passes, else the reference. Says which."""
    return store.load(get(name))


def reset(name: str | None = None) -> None:
    """Forget that exercise `name` was passed, or all of them."""
    count = store.forget([get(n) for n in ([name] if name else names())])
    print(f"Forgotten: {count} passed {'exercise' if count == 1 else 'exercises'}.")


def names(notebook: str | None = None) -> list[str]:
    """The names of all exercises, or of one notebook's, in the order in which they are met."""
    return [e.name for bank in ([notebook] if notebook else BANKS) for e in _bank(bank)]


def get(name: str) -> Exercise:
    """The exercise itself. Raises ValueError for an unknown name, with the nearest one."""
    for exercise in _bank(name.split(".")[0]) if name.split(".")[0] in BANKS else ():
        if exercise.name == name:
            return exercise
    near = difflib.get_close_matches(name, names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names())}"
    raise ValueError(f"no exercise {name!r}; {hint}")


def _is_ours(exercise: Exercise, function: Callable) -> bool:
    module = getattr(function, "__module__", None) or ""
    from_core = module.startswith("minimind_core.") and not module.startswith(f"{__name__}.")
    return from_core or function is exercise.reference


def _bank(notebook: str) -> list[Exercise]:
    return importlib.import_module(f".{BANKS[notebook]}", __name__).EXERCISES
