"""What an exercise is: a reference, cases from small to large, and a list of named mistakes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

# Two results agree if they differ by less than this share of the wanted number.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 2**-10,  # one unit in the last place
    torch.bfloat16: 2**-7,
}


@dataclass(frozen=True)
class Case:
    """One set of arguments. `label` says in a few words what is special about it."""

    label: str
    arguments: tuple

    def fresh(self) -> tuple:
        """The arguments again, tensors copied with their strides, so that no function can spoil them for the next."""
        return tuple(_copied(argument) for argument in self.arguments)


def _copied(argument: Any) -> Any:
    if torch.is_tensor(argument):
        return argument.clone(memory_format=torch.preserve_format)
    return argument.copy() if isinstance(argument, list | dict) else argument


@dataclass(frozen=True)
class Mutant:
    """A named mistake: the function that makes it, what it is, why it matters, and whose convention it is, if any."""

    name: str
    function: Callable
    mistake: str
    why: str
    whose: str | None = None


@dataclass
class Exercise:
    """One exercise of a bank.

    name: "01_rmsnorm.rms_norm", notebook and function; signature: as the reader's stub has it; returns: one name per
    result; cases: smallest first, since the first that differs is the one shown; tolerance: by dtype, where
    TOLERANCE does not fit; provides: names that the notebook has at that point and a saved solution may use.
    Where the reader writes a class: call(candidate, *arguments) builds it, runs it and returns the result;
    arguments: the names of a case's arguments, which then are not those of the signature.
    Mistakes are added with the decorator `mutant`.
    """

    name: str
    title: str
    signature: str
    reference: Callable
    cases: list[Case]
    returns: tuple[str, ...] = ("result",)
    tolerance: dict[torch.dtype, float] = field(default_factory=dict)
    provides: dict[str, Any] = field(default_factory=dict)
    call: Callable | None = None
    arguments: tuple[str, ...] = ()
    mutants: list[Mutant] = field(default_factory=list)
    outcomes: list[list] = field(default_factory=list, repr=False)  # of the mutants, kept by the first failed check

    def mutant(self, mistake: str, why: str, whose: str | None = None) -> Callable:
        """Decorator: adds the function below it to the list of mistakes."""

        def add(function: Callable) -> Callable:
            self.mutants.append(Mutant(function.__name__, function, mistake, why, whose))
            return function

        return add

    @property
    def notebook(self) -> str:
        return self.name.split(".")[0]

    @property
    def function_name(self) -> str:
        return self.name.split(".")[1]

    @property
    def parameters(self) -> list[str]:
        """The names in the signature."""
        return [name.strip() for name in self.signature.partition("(")[2].rstrip(")").split(",")]

    @property
    def argument_names(self) -> list[str]:
        return list(self.arguments) or self.parameters

    @property
    def kind(self) -> str:
        """What the reader writes: "function" or "class"."""
        return "class" if self.function_name[0].isupper() else "function"

    def allowed(self, dtype: torch.dtype) -> float:
        return {**TOLERANCE, **self.tolerance}.get(dtype, 0.0)


def case(label: str, *arguments) -> Case:
    return Case(label, arguments)


def draw(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal random numbers, the same on every machine. Checks run on the CPU, whatever MINIMIND_DEVICE says: so the
    text of a report is the same everywhere."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
