"""TrainingSettings: every number that decides a run, checked once, here."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class TrainingSettings:
    """How to train. With the same settings, model and samples, a run gives the same weights, bit for bit.

    Raises ValueError for values that cannot work; the message names the number and what it must be.
    """

    steps: int | None = None  # updates; None: as many as `epochs` need
    epochs: float = 1.0  # times through the samples, when steps is None
    batch_size: int = 16  # samples in a micro-batch
    accumulation: int = 1  # micro-batches whose gradients make one update, in each process
    learning_rate: float = 1e-3  # the highest; see cosine_learning_rate
    warm_up: int = 0  # updates until the full rate
    weight_decay: float = 0.1  # of matrices
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW: memory of the gradient, and of its square
    clip: float | None = 1.0  # longest gradient, as a Euclidean norm; None: any
    dtype: str = "float32"  # of matrix products: float32, bfloat16, or float16 with a scaled loss
    seed: int = 0  # of the order of the samples and of dropout
    evaluate_every: int = 0  # updates between two looks at the held-out samples; 0: only at the end

    def __post_init__(self):
        object.__setattr__(self, "betas", tuple(self.betas))
        whole = {"batch_size": 1, "accumulation": 1, "warm_up": 0, "evaluate_every": 0, "seed": 0}
        whole.update({} if self.steps is None else {"steps": 1})
        for name, least in whole.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}; it must be below 2**63")
        above_zero = ["learning_rate"] + ["clip"] * (self.clip is not None) + ["epochs"] * (self.steps is None)
        for name in above_zero:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be above 0 and finite")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay!r}; it must be at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; give two numbers of at least 0 and below 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")

    def to_dict(self) -> dict[str, Any]:
        """All fields as a plain dictionary."""
        return dataclasses.asdict(self)
