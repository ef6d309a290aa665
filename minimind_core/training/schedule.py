"""How fast, and which weights: the learning rate of each update, and the parameters that shrink."""

import math
from typing import Any

from torch import nn

FLOOR = 0.1  # the share of the base rate that is left at the end


def cosine_learning_rate(step: int, steps: int, base: float, warm_up: int = 0) -> float:
    """The learning rate of update `step`, counted from 0, in a run of `steps` updates.

    warm_up: updates in which it climbs in a straight line; the first one already moves, and update `warm_up` is the
    first at the full base. Then half a cosine, base * (0.1 + 0.45 * (1 + cos(pi * t / T))) with t = step - warm_up and
    T = steps - warm_up: base at t = 0, 0.55 base in the middle, 0.1 base at T, and it stays there.
    Raises ValueError unless 0 <= warm_up < steps.
    Source: MiniMind, trainer_utils.get_lr, which has no warm-up, takes its first step at t = 1, changes with every
    micro-batch rather than every update, and would climb again after T.
    """
    if not 0 <= warm_up < steps:
        raise ValueError(f"warm_up is {warm_up} of {steps} steps; it must be at least 0 and below the number of steps")
    if step < warm_up:
        return base * (step + 1) / (warm_up + 1)
    t, total = min(step, steps) - warm_up, steps - warm_up
    return base * (FLOOR + (1 - FLOOR) / 2 * (1 + math.cos(math.pi * t / total)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices, which decay, and the norms' weights, which must be free to stay near 1.

    Each Parameter once, the tied matrix too; frozen ones are left out. MiniMind lets every parameter decay.
    Source: Loshchilov and Hutter 2017, "Decoupled Weight Decay Regularization"; the split is nanoGPT's.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
