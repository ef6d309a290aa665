"""Run a reader's function beside the reference, and name the mistake."""

import dis
import inspect
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .compare import Difference, difference, kind, show
from .framework import Case, Exercise, Mutant
from .report import Report


@dataclass(frozen=True)
class Outcome:
    """What a function did on one case: a value, or an error. `spoiled` names the arguments that it changed."""

    value: Any = None
    error: Exception | None = None
    spoiled: tuple[str, ...] = ()


def examine(exercise: Exercise, function: Callable) -> Report:
    """Check `function` on every case. Touches neither the progress nor the notebook's random numbers."""
    wrong_use = _wrong_use(exercise, function)
    if wrong_use:
        return Report(exercise.name, "not yet", [wrong_use])
    wanted = [run(exercise, exercise.reference, case) for case in exercise.cases]
    got = [run(exercise, function, case) for case in exercise.cases]

    stub = _still_a_stub(function, got[0])
    if stub:
        return Report(exercise.name, "not attempted yet", [stub])
    failing = [i for i, (one, other) in enumerate(zip(wanted, got, strict=True)) if differs(exercise, one, other)]
    if not failing:
        return Report(exercise.name, "passed", _side_effects(got))

    first = failing[0]
    mutant, whole = recognize(exercise, wanted, got, failing)
    rows = _rows(exercise, exercise.cases[first])
    error = got[first].error
    if mutant is None and error is not None:
        paragraphs = _error_text(function, error)
        return Report(exercise.name, "stopped with an error", paragraphs, rows)
    found = differs(exercise, wanted[first], got[first])
    rows += [("wanted", found.wanted), ("got", found.got)]
    paragraphs = _mutant_text(mutant, whole) if mutant else _unknown_text(got[first].value, found)
    paragraphs += _error_text(function, error) if error is not None else []
    paragraphs.append(f"The smallest case that shows it: {exercise.cases[first].label}.")
    return Report(exercise.name, "not yet", paragraphs, rows, mutant.name if mutant else None)


def run(exercise: Exercise, function: Callable, case: Case) -> Outcome:
    arguments = case.fresh()
    try:
        with torch.random.fork_rng(devices=[]):
            value = exercise.call(function, *arguments) if exercise.call else function(*arguments)
    except Exception as error:
        return Outcome(error=error)
    spoiled = tuple(
        name
        for name, before, after in zip(exercise.argument_names, case.arguments, arguments, strict=True)
        if not _same_argument(before, after)
    )
    return Outcome(value, spoiled=spoiled)


def _same_argument(before: Any, after: Any) -> bool:
    if torch.is_tensor(before):
        return before.shape == after.shape and torch.equal(before, after)
    return before == after if isinstance(before, list | dict) else True


def differs(exercise: Exercise, wanted: Outcome, got: Outcome, loose: bool = False) -> Difference | None:
    if wanted.error is None and got.error is None:
        return difference(exercise, wanted.value, got.value, loose)
    if wanted.error is not None and isinstance(got.error, type(wanted.error)):
        return None  # the error that is wanted
    words = [kind(o.value) if o.error is None else f"{type(o.error).__name__}" for o in (wanted, got)]
    return Difference(f"Wanted {words[0]}, got {words[1]}.", *words)


def recognize(
    exercise: Exercise, wanted: list[Outcome], got: list[Outcome], failing: list[int]
) -> tuple[Mutant | None, bool]:
    """The mutant whose results these are, and whether it explains all of them.

    First a mutant that agrees on every case; then one that agrees up to the order of operations; then the one mutant
    that explains the smallest failing case and the most of the others, and is not refuted by a case that went right
    (a reader may have made two mistakes).
    """
    if len(exercise.outcomes) != len(exercise.mutants):
        exercise.outcomes = [[run(exercise, m.function, case) for case in exercise.cases] for m in exercise.mutants]
    outcomes = exercise.outcomes
    only_errors = all(got[i].error is not None for i in failing)  # then the message is all there is to go by
    for loose in (False, True):
        whole = [
            mutant
            for mutant, made in zip(exercise.mutants, outcomes, strict=True)
            if not any(differs(exercise, one, other, loose) for one, other in zip(made, got, strict=True))
            and not (only_errors and str(made[failing[0]].error) != str(got[failing[0]].error))
        ]
        if len(whole) == 1:
            return whole[0], True
    explained = []
    for made in outcomes:
        wrong = [i for i in range(len(got)) if differs(exercise, wanted[i], made[i], True)]
        alike = [i for i in wrong if not differs(exercise, made[i], got[i], True)]
        exact = [i for i in alike if not differs(exercise, made[i], got[i])]
        possible = set(wrong) <= set(failing) and failing[0] in alike
        possible = possible and str(made[failing[0]].error) == str(got[failing[0]].error)
        explained.append((len(alike), len(exact)) if possible else (0, 0))
    most = max(explained, default=(0, 0))
    if most > (0, 0) and explained.count(most) == 1:
        return exercise.mutants[explained.index(most)], False
    return None, False


def _wrong_use(exercise: Exercise, function: Any) -> str | None:
    word = exercise.kind
    if not callable(function) or (word == "class" and not inspect.isclass(function)):
        handed = kind(function) if not callable(function) or inspect.isroutine(function) else "an object"
        return (
            f"check wants the {word} itself, not its result: it was handed {handed}. "
            f'Write exercises.check("{exercise.name}", {exercise.function_name}), without brackets after the name.'
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # built-in functions do not tell
    names = exercise.parameters
    first = f"def {exercise.signature}:" if word == "function" else f"def __init__(self, {', '.join(names)}):"
    try:
        signature.bind(*names)
    except TypeError:
        own = list(signature.parameters)
        return (
            f"The {word} takes {_count(own)}, but the exercise calls it with {_count(names)}, in this order. "
            f"The first line of the stub is: {first}"
        )
    return None


def _count(names: list[str]) -> str:
    word = "argument" if len(names) == 1 else "arguments"
    return f"{len(names)} {word} ({', '.join(names)})" if names else "no arguments"


def _still_a_stub(function: Callable, outcome: Outcome) -> str | None:
    if outcome.error is None:
        empty = outcome.value is Ellipsis or (outcome.value is None and _does_nothing(function))
        return "The function is empty so far. Write its body and run both cells again." if empty else None
    if not isinstance(outcome.error, NotImplementedError):
        return None
    frame = _frames(outcome.error)[-1]
    raised = dis.opname[frame.tb_frame.f_code.co_code[frame.tb_lasti]] == "RAISE_VARARGS"
    if not raised or frame.tb_frame.f_globals.get("__package__"):
        return None  # libraries raise it too: PyTorch inside an operation, einops for brackets in einsum
    name, own = frame.tb_frame.f_code.co_name, _code(function)
    if own is not None and frame.tb_frame.f_code is not own:
        return f"It calls {name}, which still raises NotImplementedError. Write {name} first."
    return "The function still raises NotImplementedError. Replace that line by your code and run both cells again."


NOTHING = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}  # `pass`, or a docstring alone


def _does_nothing(function: Callable) -> bool:
    code = _code(function)
    return code is not None and {step.opname for step in dis.get_instructions(code)} <= NOTHING


def _side_effects(outcomes: list[Outcome]) -> list[str]:
    spoiled = sorted({name for outcome in outcomes for name in outcome.spoiled})
    if not spoiled:
        return []
    names = " and ".join(spoiled)
    return [
        f"One thing to mend: it changes its input ({names}) in place, and the caller still needs that. "
        f"Look for += and for names that end in an underscore, such as mul_, or for pop, del and append in a list; "
        f"make a new one instead."
    ]


def _mutant_text(mutant: Mutant, whole: bool) -> list[str]:
    lines = [f"The mistake: {mutant.mistake}."]
    if not whole:
        lines[0] += " Check again after mending it: something else differs as well."
    lines.append(f"Why it matters: {mutant.why}")
    if mutant.whose:
        lines.append(f"Not wrong everywhere: {mutant.whose}")
    return lines


def _unknown_text(value: Any, found: Difference) -> list[str]:
    if value is None:
        return ["The function returned None: is there a `return` in front of the result?"]
    lines = [found.sentence]
    if found.in_numbers:
        lines[0] += " This is none of the mistakes known here; follow the numbers below by hand."
    return lines


def _error_text(function: Callable, error: Exception) -> list[str]:
    message = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    message = message.split(" Exception raised from ")[0]
    if len(message) > 300:
        message = message[:300] + " ..."
    lines = [f"{type(error).__name__}: {message}" if message else f"{type(error).__name__}, without a message"]
    code = _code(function)
    own = [f for f in _frames(error) if code is not None and f.tb_frame.f_code.co_filename == code.co_filename]
    if own:
        number, name = own[-1].tb_lineno, own[-1].tb_frame.f_code.co_name
        text = linecache.getline(code.co_filename, number).strip()
        place = f"in line {number - own[-1].tb_frame.f_code.co_firstlineno + 1} of {name}"
        lines.append(f"It happened {place}: {text}" if text else f"It happened {place}.")
    return lines


def _frames(error: Exception) -> list:
    frames, frame = [], error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    return frames


def _code(function: Callable):
    if inspect.isclass(function):  # of a module, what it computes
        function = getattr(function, "forward", function)
    return getattr(inspect.unwrap(function), "__code__", None)


def _rows(exercise: Exercise, case: Case) -> list[tuple[str, str]]:
    return [(name, show(value)) for name, value in zip(exercise.argument_names, case.arguments, strict=True)]
