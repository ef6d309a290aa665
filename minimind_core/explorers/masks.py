"""Explorer of notebook 04: who may look at whom, with a cache, with padding, with several texts in one row."""

from itertools import groupby

import torch
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..attention import allowed_keys
from . import style
from .shell import Choice, Explorer, Result, Slider

LONGEST = 12  # new tokens, and cached ones
PADDING = 8
DOCUMENTS = "ABC"
ALLOWED, ITSELF, LATER, PADDED, OTHER = range(5)  # why a pair is as it is
LEFT, TOP, WIDE, HIGH = 72, 98, 672, 312  # the cells' place, in pixels
SIZE = (style.WIDTH, 4.55)

CONTROLS = {
    "new": Slider("new tokens", range(1, LONGEST + 1), 8, unit="tokens"),
    "cached": Slider("cached tokens", range(LONGEST + 1), 0, unit="tokens"),
    "side": Choice("padding side", ("none", "left", "right"), "none"),
    "padding": Slider("padding", range(1, PADDING + 1), 2, unit="tokens"),
    "documents": Slider("documents", range(1, len(DOCUMENTS) + 1), 1),
}
PRESETS = {
    "training": {"new": 8, "cached": 0, "side": "none", "documents": 1},
    "decode": {"new": 1, "cached": 8, "side": "none", "documents": 1},
    "chunk after a cache": {"new": 4, "cached": 6, "side": "none", "documents": 1},
    "left padding": {"new": 8, "cached": 0, "side": "left", "padding": 3, "documents": 1},
    "right padding": {"new": 8, "cached": 0, "side": "right", "padding": 3, "documents": 1},
    "two documents": {"new": 10, "cached": 0, "side": "none", "documents": 2},
}
STILLS = {"chunk": PRESETS["chunk after a cache"], "left_padding": PRESETS["left padding"]}


def padded_keys(new: int, cached: int, side: str, padding: int) -> list[int]:
    """Positions of the padding: the first ones of the row, or the last ones of the prompt.

    The prompt is what is in the cache, or all if the cache is empty; so with a cache, padding on the right leaves a
    hole before the new tokens. One position at least stays real.
    """
    if side == "left":
        return list(range(min(padding, cached + new - 1)))
    if side == "right":
        prompt = cached or new
        return list(range(prompt - min(padding, prompt - (not cached)), prompt))
    return []


def documents_of(keys: int, padded: list[int], documents: int) -> list[int]:
    """The document of each position, -1 for padding: the real ones are shared out evenly, in order."""
    real = [key for key in range(keys) if key not in padded]
    count = min(documents, len(real))
    place = {key: i * count // len(real) for i, key in enumerate(real)}
    return [place.get(key, -1) for key in range(keys)]


def compute(new: int, cached: int, side: str, padding: int, documents: int) -> Result:
    """The core's mask for `new` tokens after `cached` ones, and why each pair is allowed or hidden.

    One document needs a mask of the keys only, [batch, key]; several need one per query, [batch, query, key].
    """
    keys = cached + new
    padded = padded_keys(new, cached, side, padding)
    document = documents_of(keys, padded, documents)
    several_documents = max(document) > 0
    place = torch.tensor(document)
    real = (place >= 0)[None]  # batch key
    same = place[cached:, None] == place  # query key
    mask = real[:, None] & same if several_documents else real
    allowed = allowed_keys(new, keys, mask)[0, 0]
    causal = allowed_keys(new, keys, None)[0, 0]
    by_mask = (causal & mask)[0] if several_documents else causal & mask
    why = torch.full((new, keys), OTHER)
    why[~causal] = LATER
    why[:, ~real[0]] = PADDED
    why[by_mask] = ALLOWED
    why[allowed & ~by_mask] = ITSELF
    alone = (~by_mask.any(dim=-1)).nonzero()[:, 0] + cached  # rows that the mask leaves without any key
    numbers = {"cached": cached, "document": document, "why": why.numpy(), "alone": alone.tolist()}

    of = {reason: int((why == reason).sum()) for reason in range(5)}
    hidden = ((PADDED, "padding"), (LATER, "whose key comes later"), (OTHER, "in another document"))
    hidden = ", ".join(f"{of[reason]} {words}" for reason, words in hidden if of[reason])
    words = [
        f"{count(new, 'query', 'queries')} × {count(keys, 'key')}{f' ({cached} cached)' if cached else ''}: "
        f"{of[ALLOWED] + of[ITSELF]} of {count(new * keys, 'pair')} allowed.",
        f"Hidden: {hidden}." if hidden else "Nothing is hidden.",
    ]
    if side == "none" and padding:
        words.append(f"No side is chosen for {count(padding, 'padding token')}.")
    if padded and side == "right" and cached:
        words.append("The padding is a hole between the prompt and the new tokens.")
    ends = [key for key in padded if key >= cached and key not in numbers["alone"]]
    if ends:
        words.append(f"The queries of the padding ({span('row', ends)}) see the text; what comes of them is not used.")
    if side != "none" and len(padded) < padding:
        words.append(f"There is room for {len(padded)} of {padding} padding.")
    if max(document) + 1 < documents:
        words.append(f"Too few tokens for {documents} documents.")
    if numbers["alone"]:
        rows = span("row", numbers["alone"])
        words.append(f"The mask leaves {rows} without a key; the core lets each see itself, so nothing is NaN.")
    return Result(numbers, " ".join(words))


def count(number: int, noun: str, plural: str = "") -> str:
    """ "1 key", "4 keys"."""
    return f"{number} " + (noun if number == 1 else plural or noun + "s")


def span(noun: str, run: list[int]) -> str:
    """ "row 3", "rows 3 to 5"."""
    return f"{noun} {run[0]}" if len(run) == 1 else f"{noun}s {run[0]} to {run[-1]}"


def draw(figure: Figure) -> dict:
    width, height = (100 * side for side in SIZE)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    figure.set_layout_engine("none")  # the axes are the whole picture, in pixels
    axes.axis("off")
    axes.text(6, 15, "Who may look at whom", va="center", fontsize=12, fontweight="bold")
    axes.text(LEFT - 10, TOP - 12, "key", ha="right", va="center")
    middle = {"ha": "center", "va": "center"}
    pad = {"facecolor": "#ececec", "edgecolor": style.QUIET, "hatch": "///", "linewidth": 1}
    scene = {
        "cells": axes.add_collection(PolyCollection([], edgecolors=style.GRID, linewidths=1)),
        "padding": axes.add_patch(Rectangle((0, 0), 0, 0, **pad)),
        "own_cells": axes.add_collection(PolyCollection([], facecolors=style.HIGHLIGHT_FILL, edgecolors=style.GRID)),
        "allowed": axes.plot([], [], "o", color=style.INK, markersize=6)[0],
        "other": axes.plot([], [], "x", color=style.QUIET, markersize=6, markeredgewidth=1.2)[0],
        "itself": axes.plot([], [], **style.points("wrong") | {"marker": "D"}, markersize=7)[0],
        "border": axes.plot([], [], color=style.INK, linewidth=2)[0],
        "alone": axes.add_patch(Rectangle((0, 0), 0, 0, fill=False, edgecolor=style.color("wrong"), linewidth=2)),
        "side": axes.text(14, 0, "query (new)", rotation=90, **middle),
        "parts": [axes.add_patch(Rectangle((0, 0), 0, 0, edgecolor=style.QUIET)) for _ in range(2)],
        "part_names": [axes.text(0, TOP - 60, name, **middle) for name in ("cached", "new")],
        "groups": [axes.add_patch(Rectangle((0, 0), 0, 0, edgecolor=style.QUIET)) for _ in range(5)],
        "group_names": [axes.text(0, TOP - 36, "", **middle) for _ in range(5)],
        "keys": [axes.text(0, TOP - 12, str(i), **middle) for i in range(2 * LONGEST)],
        "queries": [axes.text(LEFT - 10, 0, "", ha="right", va="center") for _ in range(LONGEST)],
    }
    y, x = height - 18, LEFT
    for name, room, look in (
        ("allowed", 92, {"marker": "o", "color": style.INK, "markersize": 6}),
        ("no key but itself", 163, {"marker": "D", "color": style.color("wrong"), "markersize": 7}),
        ("padding", 103, None),
        ("other document", 156, {"marker": "x", "color": style.QUIET, "markersize": 6}),
        ("empty: comes later", 0, {}),
    ):
        if look is None:
            axes.add_patch(Rectangle((x - 8, y - 8), 18, 16, **pad))
        else:
            axes.plot([x], [y], linestyle="none", **look)
        axes.text(x + (14 if look != {} else -4), y, name, va="center")
        x += room
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    why, document, cached = n["why"], n["document"], n["cached"]
    new, keys = why.shape
    wide, high = min(60, WIDE / keys), min(34, HIGH / new)
    right, bottom = LEFT + keys * wide, TOP + new * high

    def cell(row: int, column: int) -> list[tuple[float, float]]:
        x, y = LEFT + column * wide, TOP + row * high
        return [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)]

    def place(name: str, reason: int) -> None:
        rows, columns = (why == reason).nonzero()
        scene[name].set_data(LEFT + (columns + 0.5) * wide, TOP + (rows + 0.5) * high)

    shades = [(*to_rgba(style.color(f"expert {i}"))[:3], 0.3) for i in range(len(DOCUMENTS))]
    every = [(row, column) for row in range(new) for column in range(keys)]
    scene["cells"].set_verts([cell(*at) for at in every])
    scene["cells"].set_facecolor([shades[document[at[1]]] if why[at] == ALLOWED else "white" for at in every])
    scene["own_cells"].set_verts([cell(*at) for at in every if why[at] == ITSELF])
    for name, reason in (("allowed", ALLOWED), ("itself", ITSELF), ("other", OTHER)):
        place(name, reason)

    runs, start = [], 0  # first key, number of keys, document
    for group, members in groupby(document):
        length = len(list(members))
        runs.append((start, length, group))
        start += length
    scene["padding"].set_bounds(0, 0, 0, 0)
    for i, (box, name) in enumerate(zip(scene["groups"], scene["group_names"], strict=True)):
        box.set_visible(i < len(runs))
        name.set_visible(i < len(runs))
        if i < len(runs):
            first, length, group = runs[i]
            box.set_bounds(LEFT + first * wide, TOP - 46, length * wide, 20)
            box.set_facecolor("#ececec" if group < 0 else shades[group])
            name.set_x(LEFT + (first + length / 2) * wide)
            letter = DOCUMENTS[group] if group >= 0 else "pad"
            roomy = length * wide > 100
            name.set_text((f"document {letter}" if group >= 0 else "padding") if roomy else letter)
            if group < 0:
                scene["padding"].set_bounds(LEFT + first * wide, TOP, length * wide, new * high)
    for i, (first, length) in enumerate(((0, cached), (cached, new))):
        scene["parts"][i].set_bounds(LEFT + first * wide, TOP - 70, length * wide, 20)
        scene["parts"][i].set_facecolor("white")
        scene["part_names"][i].set_x(LEFT + (first + length / 2) * wide)
        scene["part_names"][i].set_visible(length > 0)
    border = LEFT + cached * wide
    scene["border"].set_data(*(([border, border], [TOP - 70, bottom]) if cached else ([], [])))
    for i, text in enumerate(scene["keys"]):
        text.set_visible(i < keys)
        text.set_x(LEFT + (min(i, keys - 1) + 0.5) * wide)
    scene["side"].set_y(TOP + max(new * high, 60) / 2)
    for i, text in enumerate(scene["queries"]):
        text.set_visible(i < new)
        text.set_y(TOP + (min(i, new - 1) + 0.5) * high)
        text.set_text(str(cached + i))
    if n["alone"]:
        first = n["alone"][0] - cached
        scene["alone"].set_bounds(LEFT, TOP + first * high, right - LEFT, len(n["alone"]) * high)
    else:
        scene["alone"].set_bounds(0, 0, 0, 0)


def explore(**start) -> Explorer:
    """Build a mask: the pairs of query and key that the core allows, and why the others are hidden.

    start: controls to begin with, for example explore(new=1, cached=8).
    """
    return Explorer(
        "masks",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=SIZE,
        start=start,
    )
