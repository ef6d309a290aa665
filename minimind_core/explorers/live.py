"""The live view of notebook 14: models in training, side by side, that can be stopped and go on.

    view = live.watch({"dense": trainer, "moe": other}, lines={"bigram": 2.3}, sample=write)
    await view.run()    # shows the picture and trains; press Stop, or interrupt the kernel; run the cell again to go on

It is the explorers' shell without controls. `run` keeps the cell busy, but gives way after each update: so the kernel
hears a press of Stop, on the same thread or on another one (a subshell), and that sets a flag. A kernel that keeps such
messages until the cell is done (ipykernel 6) hears its interrupt, which stops the run in the same way.
"""

import asyncio
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from matplotlib.figure import Figure
from torch import nn

from ..training import Record, Trainer
from . import style
from .shell import Explorer, Result
from .texts import drawable

PAUSE = 0.3  # seconds between two pictures; training waits for each
LOOKS = ("after", "key", "value", "norm")  # of the models, in their order
LINES = ("reference", "before", "gate", "residual")  # and of the lines
WRITTEN, ROW = 76, 24  # characters of a text that the picture has room for, and pixels of its row


@dataclass
class History:
    """What one trainer has done: its records, and texts that its model wrote, as (update, text)."""

    records: list[Record] = field(default_factory=list)
    samples: list[tuple[int, str]] = field(default_factory=list)


HISTORIES: WeakKeyDictionary[Trainer, History] = WeakKeyDictionary()  # so that a new view of a trainer knows it all


class LiveView(Explorer):
    """Training as a picture. Made by `watch`; `run` trains. `histories`: what each model has done so far."""

    def __init__(
        self, trainers: dict[str, Trainer], lines: dict[str, float], sample: Callable[[nn.Module], str] | None
    ):
        self.trainers, self.lines, self.sample = trainers, lines, sample
        self.histories = {name: HISTORIES.setdefault(trainer, History()) for name, trainer in trainers.items()}
        self._running = self._stopping = False
        super().__init__(
            "live",
            controls={},
            compute=self._compute,
            draw=lambda figure: draw(figure, list(trainers), list(lines), sample is not None),
            update=update,
            size=(style.WIDTH, 4.2),
        )
        self.spec = self.spec | {"works": True, "again": "Idle"}
        self._draw()

    @property
    def done(self) -> float:
        """The share of all updates that is done."""
        return sum(one.step for one in self.trainers.values()) / sum(one.steps for one in self.trainers.values())

    async def run(self, updates: int | None = None) -> None:
        """Train in turns, one update of each model: `updates` more of each, or to the end; or until stopped.

        Stop and an interrupt (in JupyterLab: Esc, then I twice) end it after the present update. Nothing is lost: run
        again goes on, and the weights become those of a run that never stopped. A second interrupt is one as always. In
        plain Python: asyncio.run(view.run()). Raises what the trainers raise, and RuntimeError if it already runs.
        """
        if self._running:
            raise RuntimeError("the view trains already; stop it first")
        self._running, self._stopping = True, False
        for trainer in self.trainers.values():
            trainer.stop = 0
        handle = self._display()
        try:
            with self._interrupt_stops():
                await self._train(updates)
        finally:
            self._running = False
            self._draw(self._outcome())
        if handle is not None:
            handle.update(self)  # a stored notebook keeps the last picture

    def stop(self) -> None:
        """End `run` after the present update. For another thread, or a signal."""
        self._stopping = True
        for trainer in self.trainers.values():
            trainer.stop = 1

    async def _train(self, updates: int | None) -> None:
        turns = {}
        for name, trainer in self.trainers.items():
            left = trainer.steps - trainer.step
            turns[name] = trainer.run(left if updates is None else min(updates, left))
            if trainer.step == 0:
                self._write(name)
        self._draw()
        drawn = time.monotonic()
        while turns and not self._stopping:
            for name in list(turns):
                record = next(turns[name], None)
                if record is None:
                    del turns[name]
                    continue
                self.histories[name].records.append(record)
                if record.held_out_loss is not None:
                    self._write(name)
                await asyncio.sleep(0.001)  # the kernel hears the browser
            if time.monotonic() - drawn > PAUSE:
                self._draw()
                drawn = time.monotonic()
        for name in self.trainers:
            self._write(name)

    def _write(self, name: str) -> None:
        """Let a model write, once for each state of its weights."""
        step, samples = self.trainers[name].step, self.histories[name].samples
        if self.sample is not None and not (samples and samples[-1][0] == step):
            samples.append((step, self.sample(self.trainers[name].model)))

    def _outcome(self) -> str:
        steps = " and ".join(f"{name} at update {one.step} of {one.steps}" for name, one in self.trainers.items())
        return "" if self.done >= 1 else f"Stopped: {steps}. Run the cell again to go on."

    def _display(self):
        """Show the view in the cell that runs; None in plain Python."""
        if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
            return None
        from IPython.display import display

        return display(self, display_id=True)

    @contextmanager
    def _interrupt_stops(self) -> Iterator[None]:
        """Within it, an interrupt is a press of Stop; a second one is an interrupt."""
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield
            return

        def interrupted(number, frame):
            if self._stopping:
                before(number, frame)
            self.stop()

        signal.signal(signal.SIGINT, interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _handle_custom_msg(self, content: dict, buffers: list) -> None:
        """The browser's Stop. While `run` is busy it may come in another thread: no model or picture is touched."""
        if self._running:
            self.stop()
        else:
            self._draw(self._outcome() or "All updates are done.")

    def _draw(self, remark: str = "") -> None:
        with self._lock:
            self._show({}, remark, lambda: (self.done, self.compute()))

    def _state(self, done: float) -> dict:
        return super()._state(done) | {"working": self._running, "done": self.done}

    def _compute(self) -> Result:
        numbers, words = {"steps": max(trainer.steps for trainer in self.trainers.values())}, []
        for name, trainer in self.trainers.items():
            history = self.histories[name]
            held_out = [(r.step, r.held_out_loss) for r in history.records if r.held_out_loss is not None]
            step, text = history.samples[-1] if history.samples else (0, "")
            numbers[name] = {
                "training": np.array([(r.step, r.loss) for r in history.records]).reshape(-1, 2),
                "held_out": np.array(held_out).reshape(-1, 2),
                "text": (step, text),
            }
            words.append(f"{name}: {_words(trainer, numbers[name], self.lines)}")
        numbers["lines"] = list(self.lines.values())
        return Result(numbers, " ".join(words))

    def __repr__(self) -> str:
        """The same before and after training: what it shows, not how far it is."""
        runs = ", ".join(f"{name} {trainer.steps} updates" for name, trainer in self.trainers.items())
        return f"<Explorer {self.name}: {runs}; beside them {', '.join(self.lines) or 'no lines'}>"


def _words(trainer: Trainer, numbers: dict, lines: dict[str, float]) -> str:
    """Where one model stands, in words."""
    training, held_out = numbers["training"], numbers["held_out"]
    text = f"{trainer.step} of {trainer.steps} updates"
    if not len(training):
        return f"{text}."
    loss, kind = training[-10:, 1].mean(), "in training"
    if len(held_out):
        loss, kind = held_out[-1, 1], f"held out, at update {held_out[-1, 0]:.0f}"
    text += f", {loss:.2f} nats per token {kind}"
    beside = [
        f"{abs(loss - level):.2f} {'below' if loss < level else 'above'} the {name}" for name, level in lines.items()
    ]
    return f"{text}{': ' if beside else ''}{', '.join(beside)}."


def draw(figure: Figure, names: list[str], lines: list[str], written: bool) -> dict:
    """The losses over the updates, and below them what the models write. Returns what moves."""
    width, height = 100 * figure.get_size_inches()
    below = 10 + ROW * len(names) if written else 0  # pixels
    figure.get_layout_engine().set(rect=(0, below / height, 1, 1 - below / height))
    axes = figure.subplots()
    axes.set(title="Loss: thin in training, thick on held-out text", xlabel="update", ylabel="nats per token")
    axes.set(xlim=(0, 100), ylim=(0, 10))
    scene = {"axes": axes, "lines": [], "models": {}}
    for name, meaning in zip(lines, LINES, strict=False):
        (line,) = axes.plot([], [], **style.line(meaning), linewidth=1.5)
        label = style.label(axes, 1.01, 0.5, f"{name}\n0.00", meaning, transform=axes.transAxes)
        scene["lines"].append((line, label))
    place, plain = {"transform": axes.transAxes}, {"va": "center", "parse_math": False}
    for row, (name, meaning) in enumerate(zip(names, LOOKS, strict=False)):
        look = style.line(meaning, marker=True)
        (training,) = axes.plot([], [], color=look["color"], linewidth=0.8, alpha=0.6)
        (held_out,) = axes.plot([], [], **look, linewidth=2.5)
        axes.plot([0.3, 0.37], [0.93 - 0.1 * row] * 2, **look, **place)
        label = style.label(axes, 0.39, 0.93 - 0.1 * row, name, meaning, **place)
        scene["models"][name] = {"training": training, "held_out": held_out, "label": label}
        if written:
            y = (below - ROW * (row + 0.5)) / height
            head = figure.text(10 / width, y, "", color=look["color"], fontweight="bold", **plain)
            start = (10 + 9 * (max(map(len, names)) + 6)) / width
            text = figure.text(start, y, "", family=["DejaVu Sans Mono", "DejaVu Sans"], fontsize=9.5, **plain)
            scene["models"][name] |= {"head": head, "text": text}
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers, axes = result.numbers, scene["axes"]
    models, levels = {name: numbers[name] for name in scene["models"]}, numbers["lines"]
    losses = [loss for one in models.values() for key in ("training", "held_out") for loss in one[key][:, 1]]
    low, high = (min([*levels, *losses]), max([*levels, *losses])) if losses else (0, max([6, *levels]))
    low, high = max(0, math.floor(2 * low - 0.6) / 2), math.ceil(2 * high + 0.6) / 2
    style.limits(axes, x=(0, numbers["steps"]), y=(low, high))
    heights = [(level - low) / (high - low) for level in levels]
    free = 0.0
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        line, label = scene["lines"][i]
        line.set_data([0, numbers["steps"]], [levels[i]] * 2)
        label.set_position((1.01, max(heights[i], free)))  # above the one below it, if that is near
        free = label.get_position()[1] + 0.15
        label.set_text(f"{label.get_text().partition(chr(10))[0]}\n{levels[i]:.2f}")
    for name, one in models.items():
        artists, words = scene["models"][name], name
        for key, said, last in (("training", "in training", 10), ("held_out", "held out", 1)):
            artists[key].set_data(one[key].T)
            if len(one[key]):
                words += f"  {one[key][-last:, 1].mean():.2f} {said}"
        artists["label"].set_text(words)
        if "text" in artists:
            step, text = one["text"]
            artists["head"].set_text(f"{name} {step}" if text else "")
            artists["text"].set_text(
                "".join({" ": " ", "\n": "↵"}.get(char) or drawable(char) for char in text[:WRITTEN])
            )


def watch(
    trainers: Mapping[str, Trainer],
    lines: Mapping[str, float] | None = None,
    sample: Callable[[nn.Module], str] | None = None,
) -> LiveView:
    """A live view of up to four trainers. Nothing is trained until its `run()`.

    lines: losses to compare with, in nats per token, up to four. sample: called with a model now and then, before
    training, whenever the held-out loss is measured, and at the end of each run; returns a text to show.
    Raises ValueError for no trainer, or more than the picture has looks for.
    """
    trainers, lines = dict(trainers), dict(lines or {})
    if not 1 <= len(trainers) <= len(LOOKS) or len(lines) > len(LINES):
        raise ValueError(
            f"{len(trainers)} trainers and {len(lines)} lines; give 1 to {len(LOOKS)} and at most {len(LINES)}"
        )
    return LiveView(trainers, lines, sample)
