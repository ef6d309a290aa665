"""Compare two results, and put tensors, lists and differences into words."""

import dataclasses
import numbers
from typing import Any

import torch

from .framework import Exercise

SHOWN = 8  # a tensor of up to so many numbers is printed whole
HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first thing that differs between the wanted and the returned value."""

    sentence: str
    wanted: str
    got: str
    in_numbers: bool = False


def difference(exercise: Exercise, wanted: Any, got: Any, loose: bool = False) -> Difference | None:
    """None if `got` is as good as `wanted`. Type first, then shape, dtype and numbers.

    loose: used to recognize a mistake. Half precision may then differ by four units in the last place in every number,
    since a reader's order of operations need not be the bank's.
    """
    if wanted is None:  # such as a gradient that a parameter did not get
        return None if got is None else Difference(f"Wanted None, got {kind(got)}.", "None", kind(got))
    if isinstance(wanted, tuple):
        return _tuple_difference(exercise, wanted, got, loose)
    if torch.is_tensor(wanted):
        return _tensor_difference(exercise, wanted, got, loose)
    if isinstance(wanted, list | dict | str):
        return _plain_difference(wanted, got)
    return _number_difference(wanted, got)


def _tuple_difference(exercise: Exercise, wanted: tuple, got: Any, loose: bool) -> Difference | None:
    if not isinstance(got, tuple | list) or len(got) != len(wanted):
        names = ", ".join(exercise.returns)
        return Difference(
            f"The function should return {len(wanted)} things: {names}. It returned {kind(got)}.",
            f"({names})",
            kind(got),
        )
    for name, one, other in zip(exercise.returns, wanted, got, strict=True):
        found = difference(exercise, one, other, loose)
        if found:
            return Difference(
                f"In {name}: {found.sentence}", f"{name} {found.wanted}", f"{name} {found.got}", found.in_numbers
            )
    return None


def _tensor_difference(exercise: Exercise, wanted: torch.Tensor, got: Any, loose: bool) -> Difference | None:
    if not torch.is_tensor(got):
        return Difference(f"Wrong type: wanted {kind(wanted)}, got {kind(got)}.", kind(wanted), kind(got))
    if got.shape != wanted.shape:
        sentence = f"Wrong shape: wanted {list(wanted.shape)}, got {list(got.shape)}."
        return Difference(sentence, kind(wanted), kind(got))
    if got.dtype != wanted.dtype:
        sentence = f"Wrong dtype: wanted {dtype_name(wanted)}, got {dtype_name(got)}."
        return Difference(sentence, kind(wanted), kind(got))
    if got.is_meta or got.layout != torch.strided:
        sentence = "The tensor holds no plain numbers: it is sparse, or on the meta device."
        return Difference(sentence, kind(wanted), kind(got))
    got = got.detach().to(wanted.device)
    apart = _apart(wanted, got, exercise.allowed(wanted.dtype), loose)
    if not apart.any():
        return None
    sentence = f"{int(apart.sum())} of {apart.numel()} numbers differ."
    if apart.numel() == 1:
        sentence = "The number differs."
    if not got.isfinite().all() and wanted.isfinite().all():
        sentence += " The result holds NaN or infinity."
    return Difference(sentence, *_show_pair(wanted, got, apart), in_numbers=True)


def _apart(wanted: torch.Tensor, got: torch.Tensor, allowed: float, loose: bool) -> torch.Tensor:
    """True where two tensors of one shape and dtype differ by more than rounding."""
    if not wanted.is_floating_point():
        return wanted != got
    half = wanted.dtype in HALF
    one, other = wanted.double(), got.double()
    scale = one[one.isfinite()].abs().max() if one.isfinite().any() else one.new_tensor(0.0)
    limit = allowed * (4 if loose else 1) * one.abs() + (1e-6 if half else 0.1 * allowed) * scale
    same = (one == other) | (one.isnan() & other.isnan())
    apart = ~same & ~(one.isfinite() & ((one - other).abs() <= limit))  # of infinity nothing is a small share
    if half and not loose and not apart.any() and (~same).float().mean() > 0.02:
        return ~same  # each is within one unit, but so many cannot be luck: something was rounded too early
    return apart


def _number_difference(wanted: float, got: Any) -> Difference | None:
    number = got
    if hasattr(got, "item") and getattr(got, "ndim", 1) == 0:
        number = got.item()
    if not isinstance(number, numbers.Real):
        return Difference(f"Wrong type: wanted a number, got {kind(got)}.", show(wanted), kind(got))
    exact = isinstance(wanted, int)
    if number == wanted or (not exact and abs(number - wanted) <= 1e-6 * abs(wanted)):
        return None
    return Difference("The number differs.", show(wanted), show(number), in_numbers=True)


def _plain_difference(wanted: list | dict | str, got: Any) -> Difference | None:
    """Lists (a tuple will do), dicts and strings are compared exactly."""
    fits = list | tuple if isinstance(wanted, list) else type(wanted)
    if not isinstance(got, fits):
        return Difference(f"Wrong type: wanted {kind(wanted)}, got {kind(got)}.", _quoted(wanted), kind(got))
    got = list(got) if isinstance(wanted, list) else got
    if _equal(wanted, got):
        return None
    sentence = "The text differs."
    if isinstance(wanted, list):
        pairs = enumerate(zip(wanted, got, strict=False))
        place = next((i for i, (one, other) in pairs if not _equal(one, other)), min(len(wanted), len(got)))
        sentence = f"Wanted {len(wanted)} items, got {len(got)}; they differ from item {place} on (counted from 0)."
    elif isinstance(wanted, dict):
        both = [key for key in wanted if key in got]
        sentence = (
            f"Of {len(wanted)} keys {len(wanted) - len(both)} are missing and "
            f"{sum(not _equal(got[key], wanted[key]) for key in both)} have another value; "
            f"{len(got) - len(both)} are too many."
        )
    return Difference(sentence, _quoted(wanted), _quoted(got), in_numbers=True)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # such as a tensor of several numbers inside a list
        return False


def _quoted(value: list | dict | str) -> str:
    return repr(value if isinstance(value, list | str) else dict(value))  # not Counter(...)


def _show_pair(wanted: torch.Tensor, got: torch.Tensor, apart: torch.Tensor) -> tuple[str, str]:
    if wanted.numel() <= SHOWN:
        return show(wanted), show(got)
    place = apart.nonzero()[0].tolist()
    return tuple(f"{_digits(x[tuple(place)].item())} at {place}" for x in (wanted, got))


def kind(value: Any) -> str:
    """What a value is, in words: "a tensor [2, 3] float32", "a tuple of 2", "None"."""
    if value is None:
        return "None"
    if torch.is_tensor(value):
        return f"a tensor {list(value.shape)} {dtype_name(value)}"
    if isinstance(value, bool | numbers.Number):
        return f"the number {show(value)}"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if callable(value):
        return f"a function or class ({getattr(value, '__name__', type(value).__name__)})"
    return f"a value of type {type(value).__name__}"


def show(value: Any) -> str:
    """A value with four significant digits; a long tensor by its shape only; of a config what is not the default."""
    if torch.is_tensor(value):
        size = f"{list(value.shape)}" + ("" if value.dtype == torch.float32 else f" {dtype_name(value)}")
        if value.numel() > SHOWN:
            return size
        return f"{size} = {_nested(value.detach().tolist(), _largest(value))}"
    if isinstance(value, float):
        return _digits(value)
    if dataclasses.is_dataclass(value):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        changed = [f for f in dataclasses.fields(value) if own[f.name] != f.default]
        return f"{type(value).__name__}({', '.join(f'{f.name}={own[f.name]!r}' for f in changed)})"
    return str(value)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _largest(value: torch.Tensor) -> float:
    finite = value.detach().double().abs()
    finite = finite[finite.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def _nested(values: Any, largest: float) -> str:
    if isinstance(values, list):
        return "[" + ", ".join(_nested(v, largest) for v in values) + "]"
    if isinstance(values, float) and abs(values) < 1e-6 * largest:
        return "0"  # rounding noise beside the largest number; its digits differ from machine to machine
    return _digits(values)


def _digits(value: float) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return "0" if text == "-0" else text
