"""Which samples come next. A function of the seed and the place in the run, so a place is all there is to remember."""

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..loss import IGNORED

Sample = tuple[torch.Tensor, torch.Tensor]  # ids and labels, both int64 [length]; labels are not shifted
FINGERPRINTED = 1000  # samples, spread evenly, that stand for all


def derived_seed(*parts: int | str) -> int:
    """A seed of 63 bits for one purpose, such as (seed, "order", epoch); the same on every machine."""
    return random.Random(" ".join(map(str, parts))).getrandbits(63)


def predicted(labels: torch.Tensor) -> int:
    """How many labels of [batch, length] are predicted: those that are not ignored, the first of a row never."""
    return int((labels[:, 1:] != IGNORED).sum())


def before_last_label(labels: torch.Tensor) -> torch.Tensor:
    """[batch, length], True up to the last label of each row; what stands behind it, as padding, changes no loss."""
    learned = labels != IGNORED
    return learned.flip(-1).cumsum(dim=-1).flip(-1) > 0


def collate(samples: Sequence[Sample], indices: Sequence[int]) -> Sample:
    """Some samples as one batch: ids and labels, both [batch, length]. Raises ValueError for unequal lengths."""
    chosen = [samples[i] for i in indices]
    if len(lengths := {len(row) for pair in chosen for row in pair}) > 1:
        raise ValueError(
            f"samples of one batch have {min(lengths)} to {max(lengths)} tokens; pad all to one length, labels by -100"
        )
    ids, labels = (torch.stack(rows) for rows in zip(*chosen, strict=True))
    return ids, labels


@dataclass
class Group:
    """The micro-batches of one update that one process works on, and how much each of them weighs."""

    batches: list[Sample | None]  # one per round; None: nothing is left for this process
    tokens: list[int]  # labels that each of them predicts
    total: int  # labels that the whole group predicts, in all processes
    spare: Sample  # what a process that has nothing left runs, with weight 0


class Batches:
    """The samples, shuffled anew in every epoch and cut into micro-batches and groups.

    A group is the `size` micro-batches of one update. The last micro-batch and the last group of an epoch may be
    smaller; nothing is dropped. Micro-batch j of a group goes to process j mod processes.
    """

    def __init__(self, samples: Sequence[Sample], batch_size: int, size: int, seed: int):
        if not len(samples):
            raise ValueError("there is no sample to train on; give at least 1")
        self.samples, self.batch_size, self.size, self.seed = samples, batch_size, size, seed
        self.micro_batches = math.ceil(len(samples) / batch_size)  # per epoch
        self.updates = math.ceil(self.micro_batches / size)  # per epoch
        self._epoch, self._order = -1, []

    @cached_property
    def fingerprint(self) -> dict[str, int]:
        """A short description by which other data is noticed: the number of samples, their length, and a check sum."""
        number, check_sum = len(self.samples), 0
        for i in sorted({i * number // FINGERPRINTED for i in range(FINGERPRINTED)}):
            check_sum = zlib.crc32(repr([row.tolist() for row in self.samples[i]]).encode(), check_sum)
        return {"samples": number, "length": len(self.samples[0][0]), "check sum": check_sum}

    def order(self, epoch: int) -> list[int]:
        """The permutation of one epoch."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derived_seed(self.seed, "order", epoch))
            permutation = torch.randperm(len(self.samples), generator=generator, device=generator.device)
            self._epoch, self._order = epoch, permutation.tolist()
        return self._order

    def indices(self, step: int) -> list[list[int]]:
        """The samples of each micro-batch of update `step`."""
        epoch, place = divmod(step, self.updates)
        order, first = self.order(epoch), place * self.size
        numbers = range(first, min(first + self.size, self.micro_batches))
        return [order[i * self.batch_size : (i + 1) * self.batch_size] for i in numbers]

    def group(self, step: int, rank: int = 0, processes: int = 1) -> Group:
        """What process `rank` does for update `step`. `total` counts this process alone."""
        indices = self.indices(step)
        mine = [collate(self.samples, each) for each in indices[rank::processes]]
        tokens = [predicted(labels) for _, labels in mine]
        spare = mine[0] if mine else collate(self.samples, indices[0])
        idle = math.ceil(len(indices) / processes) - len(mine)
        return Group([*mine, *[None] * idle], [*tokens, *[0] * idle], sum(tokens), spare)
