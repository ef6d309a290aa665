"""The shell that every explorer lives in: controls, one picture, one sentence.

An explorer module gives three functions and a table of controls:

    compute(**values) -> Result    pure and fast: the numbers to draw, and one sentence computed from them
    draw(figure) -> scene          makes axes and artists once; returns a dict of everything that moves
    update(scene, result)          moves it

The shell turns them into a widget. One figure is kept and drawn again in place: what is in the scene is drawn over a
stored background (blitting, a few milliseconds). If `update` also changes something that stands still, such as limits,
ticks or a title, matplotlib marks the figure as stale and the shell draws all of it (some 50 ms more). The picture is
an `<img>` whose text alternative is the sentence under it.

The browser never has more than one change under way. While it waits for the answer it keeps only the newest value of
each control, so holding a key down can't queue up pictures.

What takes longer than a picture, such as training, gives `work(**values)` in place of compute: a generator that yields
(share done, Result) after each slice of at most 50 ms. Each is drawn, with a progress bar; between two slices the
kernel hears the browser, so a stop button and every other control stay alive. In Python the last result comes at once.
"""

import asyncio
import base64
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anywidget
import torch
import traitlets
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from . import style
from .canvas import Canvas


@dataclass(frozen=True)
class Result:
    """What one state of the controls gives: `numbers` (floats and arrays, all finite) and one `sentence` about them."""

    numbers: dict
    sentence: str


def linear(low: float, high: float, step: float) -> list[float]:
    """Slider positions from low to high, both included, `step` apart."""
    count = round((high - low) / step)
    return [float(f"{low + i * step:.10g}") for i in range(count + 1)]


def log(low: float, high: float, per_decade: int = 4) -> list[float]:
    """Slider positions from low to high in equal ratios, `per_decade` to each power of ten, rounded to three digits."""
    first, count = math.log10(low), round(math.log10(high / low) * per_decade)
    return [float(f"{10 ** (first + i / per_decade):.3g}") for i in range(count + 1)]


def powers(low: int, high: int) -> list[int]:
    """Slider positions low, 2 low, 4 low, ... up to high."""
    return [low << i for i in range(round(math.log2(high / low)) + 1)]


@dataclass(frozen=True)
class Slider:
    """A slider with a number box beside it.

    grid: the positions, in rising order (range, linear, log, powers). The number box takes any number between the
    ends; whole numbers only where the grid holds only those, grid values only where snap is true.
    unit: a word said after the number, for example "tokens".
    """

    label: str
    grid: Sequence[float]
    default: float
    unit: str = ""
    snap: bool = False

    @property
    def low(self) -> float:
        return self.grid[0]

    @property
    def high(self) -> float:
        return self.grid[-1]

    @property
    def whole(self) -> bool:
        return all(isinstance(value, int) for value in self.grid[:64])

    def text(self, value: float) -> str:
        """The value as the number box shows it."""
        return f"{value:d}" if isinstance(value, int) else f"{value:.6g}"

    def nearest(self, value: float) -> int:
        """Index of the grid position nearest to value."""
        right = min(bisect_left(self.grid, value), len(self.grid) - 1)
        left = max(right - 1, 0)
        return left if abs(self.grid[left] - value) < abs(self.grid[right] - value) else right

    def fit(self, value: float) -> tuple[float, str]:
        """The allowed value nearest to `value`, and a remark if it is another one."""
        fitted = min(max(value, self.low), self.high)
        if self.snap:
            fitted = self.grid[self.nearest(fitted)]
        fitted = round(fitted) if self.whole else float(fitted)
        if fitted == value:
            return fitted, ""
        why = f"outside {self.text(self.low)} to {self.text(self.high)}"
        if self.low <= value <= self.high:
            why = "between two positions" if self.snap else "not a whole number"
        return fitted, f"{self.label}: {value:g} is {why}; {self.text(fitted)} is used."

    def check(self, value: float) -> float:
        """The value, if it is allowed. Raises ValueError with the limits if not."""
        number = float(value)
        fitted, remark = self.fit(number) if math.isfinite(number) else (None, "")
        if fitted is None or remark:
            steps = ", whole numbers" if self.whole else ""
            steps = ", only the slider's own positions" if self.snap else steps
            raise ValueError(
                f"{self.label} must be between {self.text(self.low)} and {self.text(self.high)}{steps}; got {value!r}"
            )
        return fitted

    def read(self, raw: int | str, current: float) -> tuple[float, str]:
        """A message of the browser: a position of the slider, or the text of the number box."""
        if isinstance(raw, int):
            return self.grid[min(max(raw, 0), len(self.grid) - 1)], ""
        try:
            number = float(raw.strip().replace(",", "."))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            return current, f"{self.label}: {raw.strip()[:20]!r} is not a number; {self.text(current)} is kept."
        return self.fit(number)

    def spec(self) -> dict:
        return {"kind": "slider", "label": self.label, "last": len(self.grid) - 1}

    def shown(self, value: float) -> dict:
        return {
            "index": self.nearest(value),
            "text": self.text(value),
            "spoken": f"{self.text(value)} {self.unit}".strip(),
        }

    def samples(self) -> list[float]:
        """Values for a sweep: both ends, the middle and the default."""
        return sorted({self.low, self.grid[len(self.grid) // 2], self.high, self.default})


@dataclass(frozen=True)
class Choice:
    """A drop-down list. `options` are the values, shown as text."""

    label: str
    options: tuple
    default: object

    def check(self, value: object) -> object:
        """The value, if it is one of the options. Raises ValueError with the options if not."""
        if value not in self.options:
            raise ValueError(f"{self.label} must be one of {', '.join(map(str, self.options))}; got {value!r}")
        return value

    def read(self, raw: int, current: object) -> tuple[object, str]:
        return self.options[raw], ""

    def spec(self) -> dict:
        return {"kind": "choice", "label": self.label, "options": [str(option) for option in self.options]}

    def shown(self, value: object) -> dict:
        return {"index": self.options.index(value)}

    def samples(self) -> list:
        """Values for a sweep: every option."""
        return list(self.options)


@dataclass(frozen=True)
class Toggle:
    """A check box."""

    label: str
    default: bool

    def check(self, value: bool) -> bool:
        """The value, if it is True or False. Raises ValueError if not."""
        if not isinstance(value, bool):
            raise ValueError(f"{self.label} must be True or False; got {value!r}")
        return value

    def read(self, raw: bool, current: bool) -> tuple[bool, str]:
        return bool(raw), ""

    def spec(self) -> dict:
        return {"kind": "toggle", "label": self.label}

    def shown(self, value: bool) -> dict:
        return {"checked": value}

    def samples(self) -> list[bool]:
        """Values for a sweep: both."""
        return [False, True]


@dataclass(frozen=True)
class Text:
    """A line of the reader's own text, at most `longest` characters. What is longer is cut, an empty one is refused."""

    label: str
    default: str
    longest: int

    def check(self, value: str) -> str:
        """The text, if it is not empty and not too long. Raises ValueError with both lengths if it is."""
        if not isinstance(value, str) or not 1 <= len(value) <= self.longest:
            size = f"{len(value)} characters" if isinstance(value, str) else repr(value)
            raise ValueError(f"{self.label} must be a text of 1 to {self.longest} characters; got {size}")
        return value

    def read(self, raw: str, current: str) -> tuple[str, str]:
        if not raw:
            return current, f"{self.label}: nothing is written; the text before is kept."
        if len(raw) > self.longest:
            return raw[: self.longest], f"{self.label}: {len(raw)} characters; the first {self.longest} are used."
        return raw, ""

    def spec(self) -> dict:
        return {"kind": "text", "label": self.label}

    def shown(self, value: str) -> dict:
        return {"text": value}

    def samples(self) -> list[str]:
        """Values for a sweep: the default, one character, as long as allowed, and characters of several bytes."""
        return [self.default, "a", (self.default * self.longest)[: self.longest], "é 漢 🙂"[: self.longest]]


Control = Slider | Choice | Toggle | Text


class Explorer(anywidget.AnyWidget):
    """Controls, one picture, one sentence. Made by an explorer module's `explore(**start)`.

    name: the module's name. controls: a dict from the parameter names of `compute` to controls, in the order shown.
    work: in place of compute, for what takes longer: a generator of (share done, Result), see above.
    presets: a dict from a name to the values that it sets; other controls stay. size: of the picture in inches, at
    100 dots per inch. start: values to begin with instead of the defaults.

    In Python: `explorer.set(eps=1e-5)`, `explorer.choose("MiniMind-2")`, `explorer.reset()`, `explorer.values`,
    `explorer.result`, `explorer.sentence`, `explorer.png`. An exception in compute, work or update is shown in the
    picture's place and raised.
    """

    _esm = Path(__file__).with_name("shell.js")
    _css = Path(__file__).with_name("shell.css")
    spec = traitlets.Dict().tag(sync=True)
    shown = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        name: str,
        *,
        controls: dict[str, Control],
        compute: Callable[..., Result] | None = None,
        work: Callable[..., Iterator[tuple[float, Result]]] | None = None,
        draw: Callable,
        update: Callable,
        presets: dict[str, dict] | None = None,
        size: tuple[float, float] = (style.WIDTH, 3.4),
        start: dict | None = None,
    ):
        super().__init__()
        self.name, self.controls, self.presets = name, controls, presets or {}
        self.work, self.update = work, update
        self.compute = _one_thread()(compute or partial(_last, work))
        # JupyterLab may send a message to another thread of the kernel than the one before it
        self._lock, self._newest, self._task = threading.RLock(), 0, None
        self.values = {key: control.check(control.default) for key, control in controls.items()}
        self.remark = self.error = ""
        self.png = b""
        self._serial = 0
        for preset, values in self.presets.items():
            self._checked(values, f"preset {preset!r}")  # a misspelled preset fails here, not at the click

        self.result = self.compute(**self.values)
        with style.applied():
            self.figure = style.figure(*size)
            self.canvas = Canvas(self.figure)
            self.scene = draw(self.figure)
            self._moving = _artists(self.scene.values())
            update(self.scene, self.result)
            if engine := self.figure.get_layout_engine():
                engine.execute(self.figure)  # lays the panels out, once: from here on nothing shifts
                self.figure.set_layout_engine("none")
        for artist in self._moving:
            artist.set_animated(True)
        self.figure.stale = True
        self.spec = {
            "name": name,
            "size": self.canvas.get_width_height(),
            "presets": list(self.presets),
            "works": work is not None,
            "again": "Run again",  # what the stop button says when there is nothing to stop
            "controls": [{"name": key} | control.spec() for key, control in controls.items()],
        }
        values = self.values | self._checked(start or {}, "start")
        known = (1.0, self.result) if values == self.values else None
        self._show(values, step=known and (lambda: known))

    @property
    def sentence(self) -> str:
        """What the picture shows, in words. Also the picture's text alternative."""
        return self.result.sentence

    def set(self, **changes) -> None:
        """Move controls. Raises TypeError for an unknown control, ValueError for a value outside the limits."""
        with self._lock:
            self._newest += 1
            self._show(self.values | self._checked(changes, "set"))

    def choose(self, preset: str) -> None:
        """Set the values of a preset. Raises ValueError for an unknown one."""
        if preset not in self.presets:
            raise ValueError(f"there is no preset {preset!r}; choose one of {', '.join(self.presets)}")
        self.set(**self.presets[preset])

    def reset(self) -> None:
        """Back to the defaults."""
        self.set(**{key: control.default for key, control in self.controls.items()})

    def _checked(self, values: dict, where: str) -> dict:
        unknown = [key for key in values if key not in self.controls]
        if unknown:
            raise TypeError(f"{where}: no control named {unknown[0]!r}; the controls are {', '.join(self.controls)}")
        return {key: self.controls[key].check(value) for key, value in values.items()}

    def _handle_custom_msg(self, content: dict, buffers: list) -> None:
        """What the browser sends: {"preset": name or null, "reset": bool, "set": {control: raw value}}, or "stop"."""
        with self._lock:
            self._newest += 1
            if content.get("stop"):
                self._stopped()
                return
            values, remarks = dict(self.values), []
            if content.get("reset"):
                values = {key: control.default for key, control in self.controls.items()}
            if content.get("preset"):
                values |= self.presets[content["preset"]]
            for key, raw in content.get("set", {}).items():
                values[key], remark = self.controls[key].read(raw, values[key])
                remarks.append(remark)
            self.values, remark = values, " ".join(filter(None, remarks))
            if self.work and (loop := _running_loop()):
                self._task = loop.create_task(self._go_on(self._newest, remark))
            else:
                self._show(values, remark)

    async def _go_on(self, request: int, remark: str) -> None:
        """Do the work slice by slice, and listen to the browser in between: a newer request ends it."""
        values = self.values
        one_slice = _one_thread()(partial(next, self.work(**values)))
        while True:
            with self._lock:
                if request != self._newest:
                    return
                self._show(values, remark, one_slice)
                if self.shown["done"] >= 1:
                    return
            await asyncio.sleep(0.001)

    def _stopped(self) -> None:
        """Keep what there is, and say how much of the work that is."""
        if self.shown["done"] < 1:
            self.remark = f"Stopped at {self.shown['done']:.0%}."
        self._serial += 1
        self.shown = self.shown | {"serial": self._serial, "remark": self.remark, "done": 1.0, "working": False}

    def _show(self, values: dict, remark: str = "", step: Callable[[], tuple[float, Result]] | None = None) -> None:
        """Bring controls, picture and sentence to these values, in one message to the browser.

        step: gives the result, and how much of the work is then done; all of it, unless said.
        """
        self.values, self.remark, self.error, done = values, remark, "", 1.0
        try:
            done, result = step() if step else (1.0, self.compute(**values))
            self.update(self.scene, result)
            self.png, self.result = self._paint(), result
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._serial += 1
            self.shown = self._state(1.0 if self.error else done)

    def _state(self, done: float) -> dict:
        """All that the browser shows."""
        return {
            "serial": self._serial,
            "done": done,
            "working": done < 1,
            "picture": f"data:image/png;base64,{base64.b64encode(self.png).decode()}",
            "sentence": self.sentence,
            "remark": self.remark,
            "error": self.error,
            "preset": [name for name, some in self.presets.items() if some.items() <= self.values.items()],
            "controls": {key: control.shown(self.values[key]) for key, control in self.controls.items()},
        }

    def _paint(self) -> bytes:
        """The figure as PNG. Only the moving artists are drawn anew unless something else has changed."""
        if self.figure.stale:
            with style.applied():
                self.canvas.draw()
            self._still = self.canvas.copy_from_bbox(self.figure.bbox)
        self.canvas.restore_region(self._still)
        for artist in self._moving:
            (artist.axes or self.figure).draw_artist(artist)
        return self.canvas.png()

    def __repr__(self) -> str:
        return f"<Explorer {self.name}: {self.error or self.sentence}>"

    def _repr_mimebundle_(self, **kwargs) -> tuple[dict, dict]:
        """The widget, and for readers without a kernel the present picture and the sentence."""
        data, metadata = super()._repr_mimebundle_(**kwargs)
        return data | {"text/plain": repr(self), "image/png": base64.b64encode(self.png).decode()}, metadata


def _last(work: Callable[..., Iterator[tuple[float, Result]]], **values) -> Result:
    """All of the work at once."""
    *_, (_, result) = work(**values)
    return result


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of a kernel that hears a browser; None in plain Python."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small tensors on one thread: on a busy machine, waiting for a second core costs far more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _artists(things: Iterable) -> list[Artist]:
    """All artists in nested lists, dicts and containers, in drawing order; axes are left out."""
    found = []
    for thing in things:
        if isinstance(thing, Artist):
            found += [] if isinstance(thing, Axes) else [thing]
        elif isinstance(thing, dict):
            found += _artists(thing.values())
        elif isinstance(thing, Iterable) and not isinstance(thing, str):
            found += _artists(thing)
    return sorted(found, key=lambda artist: artist.get_zorder())
