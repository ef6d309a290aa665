"""Explorer of notebook 04: where every head of a small trained model looks, on the reader's own text."""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from ..config import MiniMindConfig
from ..generation import evaluating
from ..microscope import intermediates
from ..model import MiniMindForCausalLM
from ..toy import CONFIG
from . import style
from .shell import Explorer, Result, Slider, Text
from .texts import drawable, fitting, model

LONGEST = 32  # bytes; what does not fit is left out
MOST = 4  # heads that the picture has room for
SIZE = (style.WIDTH, 4.25)
MAP, GAP, MAPS_LEFT, MAPS_TOP = 168, 14, 42, 50  # pixels: side of one map, between two, where the first one stands
CELLS_LEFT, CELLS_TOP, CELLS_WIDE, CELL_HIGH = 74, 312, 576, 26  # the table of the chosen query
LINE = CELLS_TOP - 20  # under the characters
WIDEST = 34  # pixels of one cell

CONTROLS = {
    "text": Text("text", "an object is an object", LONGEST),
    "layer": Slider("layer", range(CONFIG.num_hidden_layers), 3),
    "position": Slider("query position", range(LONGEST), 21),
}
PRESETS = {  # what this model has learned
    "byte before": {"text": "an object is an object", "layer": 0, "position": 20},
    "word start": {"text": "an object is an object", "layer": 3, "position": 8},
    "brackets": {"text": "a[i:j] and a[i:j]", "layer": 3, "position": 5},
    "quotes": {"text": 'the "sort" of the "sort"', "layer": 2, "position": 9},
}
STILLS = {"brackets": PRESETS["brackets"]}


def weights_of(model: MiniMindForCausalLM, text: str) -> np.ndarray:
    """[layer, head, query, key]: the attention weights of the whole model on the bytes of this text."""
    device = model.model.embed_tokens.weight.device
    with evaluating(model):
        seen = intermediates(model, torch.tensor([list(text.encode())], device=device))
    return np.stack([value[0].numpy(force=True) for path, value in seen if path.endswith("self_attn.weights")])


@lru_cache(maxsize=32)
def weights(text: str) -> np.ndarray:
    """Those of the trained toy model."""
    return weights_of(model(), text)


def named(text: str, position: int, shown: Callable[[str], str] = str) -> str:
    """The byte at a position in words: "'e' at 14", "the space at 3", "byte 2 of 'é' at 8"."""
    places = [(char, part) for char in text for part in range(1, len(char.encode()) + 1)]
    char, part = places[position]
    name = "the space" if char == " " else repr(shown(char)) if char.isprintable() else f"U+{ord(char):04X}"
    return f"byte {part} of {name} at {position}" if len(char.encode()) > 1 else f"{name} at {position}"


def compute(text: str, layer: int, position: int, weights: Callable[[str], np.ndarray] = weights) -> Result:
    """The weights of one layer's heads, and where each looks most from the byte at `position`."""
    read = fitting(text, LONGEST)
    every = weights(read)[layer]
    query = min(position, every.shape[1] - 1)
    row = every[:, query]
    best = row.argmax(axis=-1)
    head = int(row.max(axis=-1).argmax())
    numbers = {
        "bytes": list(read.encode()),
        "weights": every,
        "layer": layer,
        "query": query,
        "best": best,
        "head": head,
    }

    def link(i: int) -> str:
        target = "itself" if best[i] == query else named(read, best[i])
        return f"{target}, weight {row[i, best[i]]:.2f}"

    words = f"Layer {layer}, {named(read, query)}"
    words += f" ({position} is beyond the end)" if query < position else ""
    if query == 0:
        words += ": the first byte can look only at itself, so its weight is 1 in every head."
    else:
        others = "; ".join(f"head {i}: {link(i)}" for i in range(len(every)) if i != head)
        words += f": head {head} has the strongest link, to {link(head)}. {others[0].upper()}{others[1:]}."
    if len(read) < len(text):
        words += f" Only the first {len(read.encode())} bytes are read."
    return Result(numbers, words)


def draw(figure: Figure, heads: int = CONFIG.num_attention_heads, kv_heads: int = CONFIG.num_key_value_heads) -> dict:
    width, height = (100 * side for side in SIZE)
    figure.set_layout_engine("none")  # the axes are the whole picture, in pixels
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.axis("off")
    middle, bold = {"ha": "center", "va": "center"}, {"fontweight": "bold"}
    seen = {"path_effects": [withStroke(linewidth=3, foreground="white")]}
    scene = {"title": axes.text(6, 13, "", va="center", fontsize=12, **bold), "maps": [], "rows": [], "stars": []}
    for head in range(heads):
        x, y = MAPS_LEFT + head * (MAP + GAP), MAPS_TOP
        axes.text(x, y - 10, f"head {head} (K/V {head * kv_heads // heads})", va="center")
        extent = (x, x + MAP, y + MAP, y)
        scene["maps"].append(axes.imshow(np.zeros((1, 1, 4), np.uint8), aspect="auto", extent=extent))
        axes.add_patch(Rectangle((x, y), MAP, MAP, fill=False, edgecolor=style.QUIET, zorder=3))
        scene["rows"].append(
            axes.add_patch(Rectangle((x, y), MAP, 1, fill=False, edgecolor=style.color("highlight"), zorder=4))
        )
    axes.set(xlim=(0, width), ylim=(height, 0))  # imshow has moved them
    axes.text(MAPS_LEFT - 16, MAPS_TOP + MAP / 2, "query", rotation=90, **middle)
    axes.text(MAPS_LEFT + MAP / 2, MAPS_TOP + MAP + 12, "key", **middle)
    y = MAPS_TOP + MAP + 12
    axes.text(width - 156, y, "weight 0", ha="right", va="center")
    axes.imshow(
        colormaps[style.SEQUENTIAL](np.linspace(0, 1, 64))[None],
        aspect="auto",
        extent=(width - 150, width - 34, y + 6, y - 6),
    )
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.text(width - 28, y, "1", ha="left", va="center")

    scene |= {
        "asked": axes.text(6, CELLS_TOP - 58, "", va="center", fontsize=12, parse_math=False, **bold),
        "spans": axes.add_collection(LineCollection([], colors=style.QUIET, linewidths=1)),  # bytes of one character
        "chosen": axes.add_patch(
            Rectangle((0, 0), 0, 0, facecolor=style.HIGHLIGHT_FILL, edgecolor=style.color("highlight"))
        ),
        "chars": [axes.text(0, CELLS_TOP - 30, "", parse_math=False, zorder=4, **middle) for _ in range(LONGEST)],
        "numbers": [axes.text(0, CELLS_TOP - 10, "", color=style.QUIET, fontsize=10, **middle) for _ in range(LONGEST)],
        "cells": axes.imshow(np.zeros((1, 1, 4), np.uint8), aspect="auto", extent=(0, 1, 1, 0)),
        "dots": axes.plot([], [], "o", color=style.INK, markersize=6, zorder=5, **seen)[0],
        "star": axes.plot([], [], **style.points("highlight"), markersize=14, zorder=5, **seen)[0],
        "best": [axes.text(0, CELLS_TOP + (head + 0.5) * CELL_HIGH, "", va="center") for head in range(heads)],
    }
    axes.set(xlim=(0, width), ylim=(height, 0))
    for head in range(heads):
        axes.text(CELLS_LEFT - 8, CELLS_TOP + (head + 0.5) * CELL_HIGH, f"head {head}", ha="right", va="center")
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    query, best, every = n["query"], n["best"], n["weights"]
    text = bytes(n["bytes"]).decode()
    count = len(n["bytes"])
    step = MAP / count
    colors = colormaps[style.SEQUENTIAL](every, bytes=True)
    colors[:, ~np.tri(count, dtype=bool)] = 255  # later keys
    scene["title"].set_text(f"Layer {n['layer']}: every query of the text")
    for image, row, shades in zip(scene["maps"], scene["rows"], colors, strict=True):
        image.set_data(shades)
        row.set_y(MAPS_TOP + query * step)
        row.set_height(step)

    wide = min(WIDEST, CELLS_WIDE / count)
    right = CELLS_LEFT + count * wide
    scene["asked"].set_text(f"Where {named(text, query, drawable)} looks")
    scene["cells"].set_data(colors[:, query])
    scene["cells"].set_extent((CELLS_LEFT, right, CELLS_TOP + len(best) * CELL_HIGH, CELLS_TOP))
    starts = CELLS_LEFT + wide * np.cumsum([0, *(len(char.encode()) for char in text)])
    spans = list(pairwise(starts))
    scene["spans"].set_segments([[(a + 3, LINE), (b - 3, LINE)] for a, b in spans if b - a > 1.5 * wide])
    for i, label in enumerate(scene["chars"]):
        label.set_visible(i < len(text))
        if i < len(text):
            label.set_x(sum(spans[i]) / 2)
            label.set_text(drawable(text[i]))
            if spans[i][0] <= CELLS_LEFT + (query + 0.5) * wide < spans[i][1]:
                scene["chosen"].set_bounds(spans[i][0], LINE - 22, spans[i][1] - spans[i][0], 22)
    for i, label in enumerate(scene["numbers"]):
        label.set_visible(i < count and i % 5 == 0)
        label.set_x(CELLS_LEFT + (min(i, count - 1) + 0.5) * wide)
        label.set_text(str(i))
    heads = np.arange(len(best))
    x, y = CELLS_LEFT + (best + 0.5) * wide, CELLS_TOP + (heads + 0.5) * CELL_HIGH
    others = heads != n["head"]
    scene["dots"].set_data(x[others], y[others])
    scene["star"].set_data(x[~others], y[~others])
    for head, label in enumerate(scene["best"]):
        label.set_x(right + 10)
        label.set_text(f"{every[head, query, best[head]]:.2f} at {best[head]}")
        label.set_fontweight("bold" if head == n["head"] else "normal")


def explore(model: MiniMindForCausalLM | None = None, **start) -> Explorer:
    """See the attention weights of every head on a text of your own, up to 32 bytes.

    model: a model of bytes with at most 4 heads, as it is now; the small trained model unless given.
    start: controls to begin with, for example explore(text="Hello").
    Raises ValueError for a model that does not fit.
    """
    controls, presets, see, config = CONTROLS, PRESETS, weights, CONFIG
    if model is not None:
        config = model.config
        check_fits(config)
        layers = range(config.num_hidden_layers)
        controls = CONTROLS | {"layer": Slider("layer", layers, layers[-1])}
        presets, see = {}, lru_cache(maxsize=32)(partial(weights_of, model))
    return Explorer(
        "attention",
        controls=controls,
        presets=presets,
        compute=partial(compute, weights=see),
        draw=partial(draw, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads),
        update=update,
        size=SIZE,
        start=start,
    )


def check_fits(config: MiniMindConfig) -> None:
    """Raise ValueError unless the model knows all bytes and its heads have room in the picture."""
    if config.vocab_size < 256:
        raise ValueError(f"the model has a vocabulary of {config.vocab_size}; the text is shown to it as bytes: 256")
    if config.num_attention_heads > MOST:
        raise ValueError(f"the model has {config.num_attention_heads} heads; the picture has room for {MOST}")
