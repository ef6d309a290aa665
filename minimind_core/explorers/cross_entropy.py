"""Explorer of notebook 11: which position predicts which token, what each label costs, and what a mask leaves."""

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure

from ..toy import CONFIG
from . import style
from .shell import Choice, Explorer, Result, Slider, Text
from .texts import fitting, model

LONGEST = 24  # bytes, the tokens of the small model; what does not fit is left out
SURE = 10.0  # the logit of a made-up model's only guess; all others are 0
HIGHEST = 12.0  # nats; longer bars are cut off there
SIZE = (style.WIDTH, 4.45)
LEFT, RIGHT, WIDEST = 72, 748, 36  # pixels: where the cells begin and end, and the width of one at most
READS, LABELS, HIGH = 50, 116, 24  # pixels from above: the two strips, and how high they are
BARS_TOP, BARS_BOTTOM = 152, 372
LOWEST_TEXT = 426

TRAINED, EQUAL, KNOWS, REPEATS = MODELS = (
    "trained on Python's help",
    "all logits equal",
    "knows the next token",
    "repeats what it reads",
)
NOTHING, PROMPT, MARK, SPACES = MASKS = ("nothing", "before the mark", "only the mark", "all spaces")
ASKED = ("the token that it reads", "the next token", "the token after the next")

CONTROLS = {
    "text": Text("text", "a dict is an object", LONGEST),
    "model": Choice("model", MODELS, TRAINED),
    "mask": Choice("masked", MASKS, PROMPT),
    "mark": Slider("mark", range(LONGEST), 10),
    "shifts": Slider("shifts", range(3), 1),
}
PRESETS = {
    "pretraining": {"model": TRAINED, "mask": NOTHING, "shifts": 1},
    "answer only": {"model": TRAINED, "mask": PROMPT, "shifts": 1},
    "knows nothing": {"model": EQUAL, "mask": NOTHING, "shifts": 1},
    "no shift": {"model": REPEATS, "mask": NOTHING, "shifts": 0},
    "shifted twice": {"model": KNOWS, "mask": NOTHING, "shifts": 2},
}
STILLS = {"no_shift": PRESETS["no shift"]}


@lru_cache(maxsize=64)
def logits(text: str, kind: str) -> np.ndarray:
    """[position, vocab]: what a model says about the next byte after each byte of the text."""
    ids = list(text.encode())
    if kind == TRAINED:
        with torch.inference_mode():
            return model()(torch.tensor([ids])).logits[0].double().numpy()
    guesses = np.zeros((len(ids), CONFIG.vocab_size))
    if kind == KNOWS:  # after the last byte it knows of nothing
        guesses[np.arange(len(ids) - 1), ids[1:]] = SURE
    if kind == REPEATS:
        guesses[np.arange(len(ids)), ids] = SURE
    return guesses


def named(byte: int) -> str:
    """A byte in words: "the space", "'a'", "byte C3"."""
    return "the space" if byte == 32 else repr(chr(byte)) if 32 < byte < 127 else f"byte {byte:02X}"


def masked_labels(ids: np.ndarray, mask: str, mark: int) -> np.ndarray:
    """[position]: True for the labels that are not to be learned."""
    place = np.arange(len(ids))
    return {NOTHING: place < 0, PROMPT: place < mark, MARK: place == mark, SPACES: ids == 32}[mask]


def compute(text: str, model: str, mask: str, mark: int, shifts: int) -> Result:
    """The loss of every label that a position `shifts` before it predicts, and their mean over those not masked."""
    read = fitting(text, LONGEST)
    ids = np.array(list(read.encode()))
    says = logits(read, model)
    marked = min(mark, len(ids) - 1)
    masked = masked_labels(ids, mask, marked)
    asked = np.arange(len(ids)) >= shifts  # labels that some position predicts
    own = np.zeros(len(ids))  # logit of each label, where it is predicted
    total = np.zeros(len(ids))  # logsumexp of all logits there
    source = says[: len(ids) - shifts] if shifts else says
    highest = source.max(axis=-1, keepdims=True, initial=-math.inf)
    own[asked] = source[np.arange(len(source)), ids[shifts:]]
    total[asked] = (highest + np.log(np.exp(source - highest).sum(axis=-1, keepdims=True)))[:, 0]
    losses = total - own
    counted = asked & ~masked
    count = int(counted.sum())
    mean = float(losses[counted].mean()) if count else 0.0
    numbers = {
        "bytes": ids,
        "losses": losses,
        "asked": asked,
        "masked": masked,
        "count": count,
        "sum": float(losses[counted].sum()),
        "mean": mean,
        "perplexity": math.exp(mean),
        "mark": marked,
        "logit": float(own[marked]),
        "logsumexp": float(total[marked]),
        "shifts": shifts,
    }
    words = (
        f"{plural(shifts, 'shift')}: each position is asked for {ASKED[shifts]}. {in_total(numbers, int(asked.sum()))}"
    )
    words += f" The mark is {of_mark(numbers)}"
    if mark > marked:
        words += f" {mark} is beyond the end."
    if len(read) < len(text):
        words += f" Only the first {len(ids)} bytes are read."
    return Result(numbers, words)


def plural(number: int, noun: str) -> str:
    """ "1 shift", "2 shifts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_total(numbers: dict, labels: int) -> str:
    """The loss of the whole text, in words."""
    if not numbers["count"]:
        return "No label is left to predict: the loss is 0 and teaches nothing."
    perplexity = numbers["perplexity"]
    size = f"{perplexity:,.0f}" if perplexity >= 100 else f"{perplexity:.2f}"
    size = size if perplexity < 1e6 else "over a million"
    return (
        f"{numbers['count']} of {plural(labels, 'label')} count: loss {numbers['sum']:.2f} / {numbers['count']} = "
        f"{numbers['mean']:.2f}, perplexity {size}."
    )


def of_mark(numbers: dict) -> str:
    """The marked label and its loss, in words."""
    mark, shifts = numbers["mark"], numbers["shifts"]
    words = f"{named(numbers['bytes'][mark])} at {mark}"
    if not numbers["asked"][mark]:
        return f"{words}, predicted by no position."
    loss = numbers["losses"][mark]
    words += f", predicted at {mark - shifts}: -({numbers['logit']:.2f}) + {numbers['logsumexp']:.2f} = {loss:.2f}"
    if loss < 10:
        words += f", p = {math.exp(-loss):.3f}"
    return words + (" (masked)." if numbers["masked"][mark] else ".")


def draw(figure: Figure) -> dict:
    """Two strips of tokens with arrows between them; below each label a bar. Returns what moves."""
    width, height = (100 * side for side in SIZE)
    figure.set_layout_engine("none")  # the strips are laid out in pixels
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    page.axis("off")
    bars = figure.add_axes(
        (LEFT / width, 1 - BARS_BOTTOM / height, (RIGHT - LEFT) / width, (BARS_BOTTOM - BARS_TOP) / height)
    )
    bars.set(xlim=(LEFT, RIGHT), ylim=(0, HIGHEST * 1.12), xticks=[], yticks=range(0, 13, 3), ylabel="loss, nats")
    middle = {"ha": "center", "va": "center"}
    for name, y in (("reads", READS), ("label", LABELS)):
        page.text(LEFT - 10, y + HIGH / 2, name, ha="right", va="center")
    page.plot([16, 62], [LOWEST_TEXT, LOWEST_TEXT], **style.line("reference"))
    page.plot([39], [LOWEST_TEXT - 26], **style.points("highlight"), markersize=12)

    def boxes(axes: Axes, order: float = 1, **look) -> PolyCollection:
        return axes.add_collection(PolyCollection([], zorder=order, **look), autolim=False)

    def arrows(color: str, linestyle: str = "-", width: float = 1.6) -> list:
        lines = LineCollection([], colors=color, linestyles=linestyle, linewidths=width, zorder=2.5)
        (heads,) = page.plot([], [], "v", color=color, markersize=4 * width, zorder=2.6)
        return [page.add_collection(lines), heads]

    def row(y: float, **options) -> list:
        return [page.text(0, y, "", parse_math=False, zorder=4, **middle, **options) for _ in range(LONGEST)]

    ignored = style.fill("before", 0.25) | {"hatch": "///"}
    marked = {"facecolor": style.HIGHLIGHT_FILL, "edgecolor": style.color("highlight")}
    scene = {
        "title": page.text(8, 14, "", va="center", fontsize=12, fontweight="bold"),
        "cells": boxes(page, facecolor="white", edgecolor=style.QUIET, linewidth=1),
        "hidden": boxes(page, **ignored | {"edgecolor": "#bcbcbc"}),  # pale: letters stand on it
        "marked": boxes(page, 1.5, linewidth=1.2, **marked),
        "frame": boxes(page, 3, linewidth=2, **marked | {"facecolor": "none"}),
        "arrows": arrows(style.color("after")),
        "idle": arrows(style.color("before"), ":"),
        "mark_arrow": arrows(style.color("highlight"), width=2.6),
        "numbers": row(READS - 11, color=style.QUIET, fontsize=10),
        "read": row(READS + HIGH / 2, fontweight="bold"),
        "wanted": row(LABELS + HIGH / 2, fontweight="bold"),
        "bars": boxes(bars, **style.fill("after")),
        "hidden_bars": boxes(bars, **ignored),
        "mean": bars.plot([], [], **style.line("reference"), linewidth=1.4, zorder=0.9)[0],
        "values": [bars.text(0, 0, "", ha="center", va="bottom", fontsize=10, zorder=4) for _ in range(LONGEST)],
        "star": bars.plot([], [], **style.points("highlight"), markersize=12, zorder=5)[0],
        "of_mark": page.text(72, LOWEST_TEXT - 26, "", va="center", parse_math=False),
        "total": page.text(72, LOWEST_TEXT, "", va="center", fontweight="bold"),
    }
    return scene


def _box(x: float, y: float, wide: float, high: float) -> list[tuple[float, float]]:
    return [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)]


def _point(artists: list, middles: np.ndarray, targets: np.ndarray, shifts: int) -> None:
    """Arrows from the positions that are asked to these targets."""
    lines, heads = artists
    top, bottom = READS + HIGH, LABELS - 4
    lines.set_segments([[(middles[t - shifts], top), (middles[t], bottom)] for t in targets])
    heads.set_data(middles[targets], np.full(len(targets), bottom))


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    n = result.numbers
    ids, losses, asked, masked = n["bytes"], n["losses"], n["asked"], n["masked"]
    mark, shifts, count = n["mark"], n["shifts"], len(n["bytes"])
    wide = min(WIDEST, (RIGHT - LEFT) / count)
    starts = LEFT + wide * np.arange(count)
    middles = starts + wide / 2
    scene["title"].set_text(f"{plural(shifts, 'shift')}: each position is asked for {ASKED[shifts]}")
    top = np.minimum(losses, HIGHEST)
    for i in range(LONGEST):
        here = i < count
        for name in ("numbers", "read", "wanted"):
            scene[name][i].set_visible(here)
        scene["values"][i].set_visible(here and bool(asked[i]))
        if not here:
            continue
        char = "␣" if ids[i] == 32 else chr(ids[i]) if 32 < ids[i] < 127 else f"{ids[i]:02X}"
        for name, words in (("numbers", str(i)), ("read", char), ("wanted", char)):
            scene[name][i].set_x(middles[i])
            scene[name][i].set_text(words)
        scene["values"][i].set_position((middles[i], top[i] + 0.1))
        scene["values"][i].set_text(f"{losses[i]:.1f}" if losses[i] < 9.95 else f"{losses[i]:.0f}")
        scene["values"][i].set_color(style.QUIET if masked[i] else style.INK)

    def cells(y: float, places: Iterable[int]) -> list:
        return [_box(starts[i], y, wide, HIGH) for i in places]

    def columns(places: Iterable[int]) -> list:
        return [_box(starts[i] + 0.14 * wide, 0, 0.72 * wide, top[i]) for i in places]

    places = np.arange(count)
    counted, ignored = asked & ~masked, asked & masked
    scene["cells"].set_verts(cells(READS, places) + cells(LABELS, places))
    scene["hidden"].set_verts(cells(LABELS, places[masked]))
    scene["marked"].set_verts(
        cells(READS, [mark - shifts] if asked[mark] else []) + cells(LABELS, [] if masked[mark] else [mark])
    )
    scene["frame"].set_verts(cells(LABELS, [mark]))
    scene["bars"].set_verts(columns(places[counted]))
    scene["hidden_bars"].set_verts(columns(places[ignored]))
    _point(scene["arrows"], middles, places[counted & (places != mark)], shifts)
    _point(scene["idle"], middles, places[ignored & (places != mark)], shifts)
    _point(scene["mark_arrow"], middles, places[asked & (places == mark)], shifts)
    shown = bool(n["count"])
    scene["mean"].set_data(*(([LEFT, LEFT + wide * count], [min(n["mean"], HIGHEST)] * 2) if shown else ([], [])))
    raised = top[mark] + 1.6
    scene["star"].set_data(*(([middles[mark]], [raised]) if asked[mark] and raised < HIGHEST else ([], [])))
    words = of_mark(n)
    scene["of_mark"].set_text(words[0].upper() + words[1:] if words[0].isalpha() else words)
    scene["total"].set_text(in_total(n, int(asked.sum())))


def explore(**start) -> Explorer:
    """See the loss of every token of a text of your own, up to 24 bytes, with masks and with 0, 1 or 2 shifts.

    start: controls to begin with, for example explore(text="Hello").
    """
    return Explorer(
        "cross_entropy",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=SIZE,
        start=start,
    )
