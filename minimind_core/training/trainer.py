"""Trainer: samples go in, updates come out, one at a time; it can stop anywhere and go on as if it had not."""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ..config import MiniMindConfig
from ..device import pick_device
from ..model import MiniMindForCausalLM
from . import checkpoint, processes
from .batches import Batches, Group, Sample, before_last_label, collate, derived_seed, predicted
from .interrupts import postponed_interrupt
from .schedule import cosine_learning_rate, parameter_groups
from .settings import DTYPES, TrainingSettings


class Record(NamedTuple):
    """What one update was like."""

    step: int  # the number of this update, from 1
    loss: float  # mean over all tokens of the update, in nats per token, before it
    aux_loss: float  # the load-balancing loss, coefficient included; 0 for a dense model
    learning_rate: float
    gradient_norm: float  # before clipping; not finite if float16 overflowed, and then nothing was updated
    tokens: int  # predicted in the whole run so far
    seconds: float  # of training in the whole run so far, without pauses and evaluations
    skipped: int  # updates so far without any label to predict
    overflows: int  # updates so far that float16 could not hold
    held_out_loss: float | None  # nats per token, when it was time to look


class Trainer:
    """Trains a model on samples by AdamW, with gradient accumulation, clipping and mixed precision.

    model: called as model(ids, labels=labels) -> .loss (mean over the predicted labels), .aux_loss; it is moved to
    `device`, pick_device() unless given. samples: samples[i] -> (ids, labels), int64 [length], labels not shifted, -100
    where nothing is to be learned. held_out: samples that are only looked at. Under torchrun every process makes the
    same Trainer; they share the micro-batches of each update.

    The gradient of an update is that of the mean over all labels of its micro-batches, however unevenly these are
    spread: each micro-batch weighs as much as its share of the labels. (A mean of the micro-batches' means would weigh
    a label in a short text more than one in a long text.) The load-balancing loss is weighed the same way; it counts
    the tokens of each row up to its last label, not the padding behind.

    Random numbers are a function of the settings' seed and the place in the run, so a run that stops and goes on is
    the run that never stopped, bit for bit: on a CPU with the same number of threads, on a GPU under
    torch.use_deterministic_algorithms(True). The global random state is left alone.

    Attributes to read: step (updates done), steps (of the whole run), micro (rounds done of the next update).
    stop: set it to anything but 0, and run() returns after the micro-batch that it is at; 0 lets it go on.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[Sample],
        settings: TrainingSettings | None = None,
        held_out: Sequence[Sample] | None = None,
        device: torch.device | None = None,
    ):
        self.settings = settings = settings or TrainingSettings()
        self.device = pick_device() if device is None else device
        self.samples, self.held_out = samples, held_out
        self.batches = Batches(samples, settings.batch_size, settings.accumulation * processes.count(), settings.seed)
        self.steps = settings.steps or math.ceil(settings.epochs * self.batches.updates)
        cosine_learning_rate(0, self.steps, settings.learning_rate, settings.warm_up)  # raises if it cannot be
        halves = {parameter.dtype for parameter in model.parameters()} & {torch.float16, torch.bfloat16}
        if halves:
            raise ValueError(
                f"the weights are {halves.pop()}, too coarse for small updates; train model.float(), and choose the "
                f"precision of matrix products by the settings' dtype"
            )
        self.model = model.to(self.device)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, settings.weight_decay), lr=settings.learning_rate, betas=settings.betas, fused=True
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.dtype == "float16")
        self.parallel = processes.parallel(model)
        self.step = self.micro = self.tokens = self.skipped = self.overflows = self.stop = 0
        self.seconds = 0.0
        self._group: Group | None = None
        self.sums = torch.zeros(2, device=self.device)  # loss and aux loss of the group so far
        self._unseen: Record | None = None

    def run(self, steps: int | None = None) -> Iterator[Record]:
        """Train, one record per update: `steps` more updates, or to the end of the run.

        Break out of the loop, or interrupt it, and call run() again: nothing is lost, not even half an update.
        Raises FloatingPointError, before the weights are touched, when loss or gradient are not finite.
        """
        last = self.steps if steps is None else self.step + steps
        while self.step < last or self._unseen is not None:
            if self._unseen is None:
                self.stop = processes.largest(self.stop)
                if self.stop:
                    return
                with postponed_interrupt():
                    self._unseen = self._micro_step()
            if self._unseen is not None:
                record, self._unseen = self._unseen, None
                yield record

    def _micro_step(self) -> Record | None:
        start = time.perf_counter()
        try:
            self.model.train()  # a caller may have looked at it in evaluation mode
            if self._group is None:
                self._begin_group()
            ends = self.micro + 1 == len(self._group.batches)
            if self._group.total:
                self._backward(ends)
            self.micro += 1
            if not ends:
                self.seconds += time.perf_counter() - start
                return None
            record = self._update() if self._group.total else self._skip()
        except BaseException:
            self._end_group()  # whatever is half done will be done anew
            raise
        self.step += 1
        self.tokens += self._group.total
        self._end_group()
        self.seconds += time.perf_counter() - start
        return record and self._complete(record)

    def _begin_group(self) -> None:
        if self.micro == 0:
            self.optimizer.zero_grad(set_to_none=True)
        self._group = self.batches.group(self.step, processes.rank(), processes.count())
        self._group.total = int(processes.add(self._group.total)[0])

    def _end_group(self) -> None:
        self._group, self.micro = None, 0
        self.sums.zero_()

    def _backward(self, ends: bool) -> None:
        """Add the gradient of one micro-batch, weighed by its share of the group's labels."""
        group = self._group
        share, batch = group.tokens[self.micro] / group.total, group.batches[self.micro]
        everybody = ends and self.parallel is not self.model  # gradients are summed now: no process may be missing
        if not share and not everybody:
            return
        ids, labels = batch if share else (group.spare[0], group.spare[0])
        ids, labels = (tensor.to(self.device, non_blocking=True) for tensor in (ids, labels))
        # whether to sum the gradients is decided in forward, so the flag comes first
        with self._seeded(), nullcontext() if ends or self.parallel is self.model else self.parallel.no_sync():
            with self._autocast():
                output = self.parallel(ids, labels=labels, **self._counted(labels))
            loss = share * (output.loss + output.aux_loss)
            loss = processes.count() * loss  # DistributedDataParallel takes the mean; the sum is wanted
            self.scaler.scale(loss).backward()
        self.sums += share * torch.stack([output.loss, output.aux_loss]).detach()

    def _counted(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """For a mixture of experts: padding is not part of the load."""
        mixture = getattr(getattr(self.model, "config", None), "use_moe", False)
        return {"attention_mask": before_last_label(labels)} if mixture else {}

    def _update(self) -> Record:
        loss, aux_loss = processes.add(*self.sums.tolist())
        settings = self.settings
        rate = cosine_learning_rate(self.step, self.steps, settings.learning_rate, settings.warm_up)
        self._check_finite("loss", loss + aux_loss, rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.unscale_(self.optimizer)  # before clipping: the limit is for the true gradient
        clip = math.inf if settings.clip is None else settings.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip).item()
        scale = self.scaler.get_scale()  # 1 without float16
        if scale <= 1:  # above it, a gradient that is not finite has overflowed: the scaler leaves such an update out
            self._check_finite("gradient", norm, rate)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.overflows += self.scaler.get_scale() < scale
        return Record(0, loss, aux_loss, rate, norm, 0, 0.0, 0, 0, None)

    def _skip(self) -> None:
        self.skipped += 1
        warnings.warn("an update without any label to predict is left out", stacklevel=4)

    def _complete(self, record: Record) -> Record:
        every = self.settings.evaluate_every
        due = self.step == self.steps or (every and self.step % every == 0)
        held_out_loss = self.evaluate(self.held_out) if due and self.held_out is not None else None
        counts = {name: getattr(self, name) for name in ("step", "tokens", "seconds", "skipped", "overflows")}
        return record._replace(**counts, held_out_loss=held_out_loss)

    def _check_finite(self, what: str, value: float, rate: float) -> None:
        if not math.isfinite(value):
            settings = self.settings
            raise FloatingPointError(
                f"the {what} of update {self.step + 1} is {value} (learning rate {rate:.3g}, warm_up "
                f"{settings.warm_up}, clip {settings.clip}, dtype {settings.dtype}); the weights are still those after "
                f"update {self.step}: try a lower learning_rate, a longer warm_up, or dtype bfloat16 or float32"
            )

    def _autocast(self) -> AbstractContextManager:
        name = self.settings.dtype
        return nullcontext() if name == "float32" else torch.autocast(self.device.type, dtype=DTYPES[name])

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Dropout's random numbers are a function of the micro-batch; the caller's generator is as before after it."""
        number = self.micro * processes.count() + processes.rank()
        devices = [self.device] if self.device.type == "cuda" else []  # device: others have one generator, or none
        with torch.random.fork_rng(devices):
            torch.manual_seed(derived_seed(self.settings.seed, "dropout", self.step, number))
            yield

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample]) -> float:
        """The mean loss over all labels that are predicted in samples, in nats per token, in evaluation mode.

        Raises ValueError if there is none. Under torchrun a task for all processes together.
        """
        size, training, sums = self.settings.batch_size, self.model.training, [0.0, 0]
        self.model.eval()
        try:
            for start in range(processes.rank() * size, len(samples), processes.count() * size):
                ids, labels = collate(samples, range(start, min(start + size, len(samples))))
                if tokens := predicted(labels):
                    with self._autocast():
                        loss = self.model(ids.to(self.device), labels=labels.to(self.device)).loss
                    sums = [sums[0] + loss.item() * tokens, sums[1] + tokens]
        finally:
            self.model.train(training)
        total, tokens = processes.add(*sums)
        if not tokens:
            raise ValueError(f"none of the {len(samples)} samples has a label to predict; give at least 1")
        return total / tokens

    def save(self, path: str | Path) -> None:
        """Write all that the run needs to go on, to a temporary file that is then renamed. For all processes.

        Raises OSError if it cannot be written; a file of that name is then as it was.
        """
        checkpoint.save(self, path)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        samples: Sequence[Sample],
        held_out: Sequence[Sample] | None = None,
        device: torch.device | None = None,
        model: nn.Module | None = None,
        settings: TrainingSettings | None = None,
    ) -> "Trainer":
        """The Trainer that was saved, at its very place in the run.

        model and settings: made from the file unless given. Raises ValueError if they or the samples are not those of
        the run, with both values, and for a damaged file; FileNotFoundError if there is none.
        """
        state = checkpoint.read(path)
        if model is None:
            if not state["identity"]["model"]:
                raise ValueError(f"{path} holds a model without a config; give model=")
            model = MiniMindForCausalLM(MiniMindConfig(**state["identity"]["model"]))
        trainer = cls(model, samples, settings or TrainingSettings(**state["settings"]), held_out, device)
        checkpoint.restore(trainer, state, path)
        return trainer
