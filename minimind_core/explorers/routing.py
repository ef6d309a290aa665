"""Explorer of notebooks 08 and 14: which expert every byte of the reader's text goes to, in a trained model."""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..generation import evaluating
from ..microscope import intermediates
from ..model import MiniMindForCausalLM
from ..toy import CONFIGS
from . import style
from .attention import LONGEST, named
from .shell import Explorer, Result, Slider, Text
from .texts import drawable, fitting, model

CONFIG = CONFIGS["moe"]
KINDS = ("letters", "digits", "spaces", "others")
MOST_LAYERS, MOST_EXPERTS = 6, 8  # that the picture has room for
SIZE = (style.WIDTH, 4.2)
LEFT, TOP, WIDE, ROW, WIDEST = 74, 66, 660, 24, 34  # pixels: the strip of bytes, its rows, one cell at most

CONTROLS = {
    "text": Text("text", "x = [1, 20, 300] is a list", LONGEST),
    "layer": Slider("layer", range(CONFIG.num_hidden_layers), 1),
    "position": Slider("byte at", range(LONGEST), 5),
}
PRESETS = {
    "code": {"text": "x = [1, 20, 300] is a list", "layer": 1, "position": 5},
    "words": {"text": "an object is an object", "layer": 2, "position": 3},
    "numbers": {"text": "3.14 + 2.72 = 5.86", "layer": 0, "position": 2},
    "another alphabet": {"text": "é and 漢 and 🙂", "layer": 1, "position": 7},
}
STILLS = {"words": PRESETS["words"]}


def routes_of(model: MiniMindForCausalLM, text: str) -> np.ndarray:
    """[layer, byte, expert]: every router's probabilities."""
    device = model.model.embed_tokens.weight.device
    with evaluating(model):
        seen = intermediates(model, torch.tensor([list(text.encode())], device=device))
    return np.stack([value[0].numpy(force=True) for path, value in seen if path.endswith("gate.probs")])


@lru_cache(maxsize=32)
def routes(text: str) -> np.ndarray:
    """Those of the trained toy model."""
    return routes_of(model("moe"), text)


def kind(byte: int) -> int:
    """Index into KINDS."""
    char = chr(byte)
    return 3 if byte > 127 else 0 if char.isalpha() else 1 if char.isdigit() else 2 if char.isspace() else 3


def compute(text: str, layer: int, position: int, routes: Callable = routes) -> Result:
    """Where each byte goes, how sure the router is at `position`, and what kind of byte each expert gets."""
    read = fitting(text, LONGEST)
    probs = routes(read)
    expert = probs.argmax(axis=-1)  # the first choice
    data, experts = list(read.encode()), probs.shape[-1]
    place = min(position, len(data) - 1)
    table = np.zeros((len(KINDS), experts), dtype=int)
    np.add.at(table, ([kind(byte) for byte in data], expert[layer]), 1)
    numbers = {
        "bytes": data,
        "expert": expert,
        "layer": layer,
        "position": place,
        "probability": probs[layer, place],
        "table": table,
    }
    chosen = expert[layer, place]
    words = f"Layer {layer}, {named(read, place)}"
    words += f" ({position} is beyond the end)" if place < position else ""
    words += f": expert {chosen}, probability {probs[layer, place, chosen]:.2f}."
    for name, row in zip(KINDS, table, strict=True):
        if row.sum() > 1:
            words += f" {row.max()} of {row.sum()} {name} go to expert {row.argmax()};"
    load = table.sum(axis=0)
    idle = ", ".join(str(i) for i in range(experts) if not load[i]) or "none"
    words = f"{words.rstrip(';')}. " if words.endswith(";") else f"{words} "
    words += f"Busiest: expert {load.argmax()} with {load.max()} of {len(data)} bytes; idle here: {idle}."
    if len(read) < len(text):
        words += f" Only the first {len(data)} bytes are read."
    return Result(numbers, words)


def pale(expert: int) -> tuple[float, float, float]:
    """An expert's color as a background."""
    return tuple(1 - 0.35 * (1 - part) for part in to_rgb(style.color(f"expert {expert}")))


def draw(figure: Figure, layers: int = CONFIG.num_hidden_layers, experts: int = CONFIG.num_experts) -> dict:
    """The strip of bytes with a row for each layer; below it the chosen byte's probabilities and the table of kinds."""
    width, height = (100 * side for side in SIZE)
    figure.set_layout_engine("none")  # the strip is laid out in pixels
    strip = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    strip.axis("off")
    middle = {"ha": "center", "va": "center"}
    strip.text(6, 14, "The expert of every byte, layer by layer", va="center", fontsize=12, fontweight="bold")
    bottom = TOP + layers * ROW
    scene = {
        "chosen": strip.add_patch(
            Rectangle((0, 0), 0, 0, facecolor=style.HIGHLIGHT_FILL, edgecolor=style.color("highlight"))
        ),
        "chars": [strip.text(0, TOP - 14, "", parse_math=False, zorder=4, **middle) for _ in range(LONGEST)],
        "cells": strip.imshow(np.ones((1, 1, 3)), aspect="auto", extent=(0, 1, 1, 0)),
        "marks": [
            strip.plot([], [], **style.points(f"expert {expert}"), markersize=6, zorder=5)[0]
            for expert in range(experts)
        ],
        "row": strip.add_patch(Rectangle((0, 0), 0, ROW, fill=False, edgecolor=style.INK, linewidth=2, zorder=6)),
    }
    strip.set(xlim=(0, width), ylim=(height, 0))  # imshow has moved them
    for layer in range(layers):
        strip.text(LEFT - 8, TOP + (layer + 0.5) * ROW, f"layer {layer}", ha="right", va="center")
    for expert in range(experts):  # the key to the marks
        x = LEFT + expert * WIDE / MOST_EXPERTS
        strip.plot(x + 4, bottom + 16, **style.points(f"expert {expert}"), markersize=6)
        strip.text(x + 12, bottom + 16, f"expert {expert}", va="center", color=style.color(f"expert {expert}"))

    low, high = 0.11, 1 - (bottom + 62) / height  # of the two panels
    sure = figure.add_axes((LEFT / width, low, 0.32, high - low))
    sure.set(xlim=(0, 1.18), ylim=(experts - 0.4, -0.6), xticks=[0, 0.5, 1], yticks=[])
    sure.grid(False, axis="y")
    scene["title"] = sure.set_title("")
    scene["bars"], scene["values"] = [], []
    for expert in range(experts):
        sure.text(-0.03, expert, f"expert {expert}", ha="right", va="center", fontsize=10)
        scene["bars"].append(sure.barh(expert, 0, height=0.7, **style.fill(f"expert {expert}"))[0])
        scene["values"].append(sure.text(0, expert, "", va="center", fontsize=10))

    left = 0.62
    kinds = figure.add_axes((left, low, 0.98 - left, high - low))
    kinds.set(xlim=(-0.5, experts - 0.5), ylim=(len(KINDS) - 0.5, -0.5), xticks=range(experts))
    kinds.set_yticks(range(len(KINDS)), KINDS)
    kinds.tick_params(length=0)
    kinds.grid(False)
    kinds.set_xlabel("expert", labelpad=1)
    scene["kinds_title"] = kinds.set_title("")
    scene["table"] = kinds.imshow(np.ones((len(KINDS), experts, 3)), aspect="auto")
    scene["counts"] = [[kinds.text(x, y, "", **middle) for x in range(experts)] for y in range(len(KINDS))]
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    n = result.numbers
    data, expert, layer, place = n["bytes"], n["expert"], n["layer"], n["position"]
    text, count = bytes(data).decode(), len(data)
    wide = min(WIDEST, WIDE / count)
    right, bottom = LEFT + count * wide, TOP + len(expert) * ROW
    shades = np.array([pale(i) for i in range(len(n["probability"]))])
    scene["cells"].set_data(shades[expert])
    scene["cells"].set_extent((LEFT, right, bottom, TOP))
    for i, marks in enumerate(scene["marks"]):
        rows, columns = np.nonzero(expert == i)
        marks.set_data(LEFT + (columns + 0.5) * wide, TOP + (rows + 0.5) * ROW)
    scene["row"].set_bounds(LEFT, TOP + layer * ROW, right - LEFT, ROW)
    starts = np.cumsum([0, *(len(char.encode()) for char in text)])
    for i, label in enumerate(scene["chars"]):
        label.set_visible(i < len(text))
        if i < len(text):
            first, behind = LEFT + wide * starts[i], LEFT + wide * starts[i + 1]
            label.set_x((first + behind) / 2)
            label.set_text(drawable(text[i]))
            if starts[i] <= place < starts[i + 1]:
                scene["chosen"].set_bounds(first, TOP - 25, behind - first, 22)
    scene["title"].set_text(f"Router at byte {place}")
    for bar, label, value in zip(scene["bars"], scene["values"], n["probability"], strict=True):
        bar.set_width(value)
        label.set_x(value + 0.03)
        label.set_text(f"{value:.2f}")
    scene["kinds_title"].set_text(f"Who gets what, layer {layer}")
    share = n["table"] / n["table"].sum(axis=1, keepdims=True).clip(min=1)
    scene["table"].set_data(1 - (1 - shades) * share[..., None])
    for labels, row in zip(scene["counts"], n["table"], strict=True):
        for label, number in zip(labels, row, strict=True):
            label.set_text(str(number) if number else "")


def explore(model: MiniMindForCausalLM | None = None, **start) -> Explorer:
    """See which expert every byte of your own text goes to, up to 32 bytes.

    model: a mixture of experts on bytes, as it is now; the small trained model unless given.
    start: controls to begin with, for example explore(text="Hello").
    Raises ValueError for a model that does not fit.
    """
    controls, presets, see, config = CONTROLS, PRESETS, routes, CONFIG
    if model is not None:
        config = model.config
        layers = config.num_hidden_layers
        if not config.use_moe:
            raise ValueError("the model has no experts (use_moe=False): there is nothing to route")
        if config.vocab_size < 256:
            raise ValueError(f"the model's vocabulary is {config.vocab_size}; the text is shown to it as bytes: 256")
        if layers > MOST_LAYERS or config.num_experts > MOST_EXPERTS:
            raise ValueError(
                f"the model has {layers} layers of {config.num_experts} experts; the picture has room for "
                f"{MOST_LAYERS} of {MOST_EXPERTS}"
            )
        controls = CONTROLS | {"layer": Slider("layer", range(layers), min(1, layers - 1))}
        presets, see = {}, lru_cache(maxsize=32)(partial(routes_of, model))
    return Explorer(
        "routing",
        controls=controls,
        presets=presets,
        compute=partial(compute, routes=see),
        draw=partial(draw, layers=config.num_hidden_layers, experts=config.num_experts),
        update=update,
        size=SIZE,
        start=start,
    )
