"""Explorer of notebook 09: the dispatch of the reader's own routing table, step by step, there and back."""

from functools import lru_cache

import torch
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from . import style
from .shell import Explorer, Result, Slider, Text

MOST_EXPERTS, MOST_TOKENS, MOST = 8, 8, 16  # the last: assignments
FIRST_RUN = 6  # the step in which expert 0 runs
SHARES = {1: (1.0,), 2: (0.6, 0.4), 3: (0.5, 0.3, 0.2), 4: (0.4, 0.3, 0.2, 0.1)}  # weights of a token's experts, by k
SIZE = (style.WIDTH, 4.7)
LEFT, RIGHT, HIGH, WIDEST = 102, 742, 36, 60  # pixels: where cells begin and end, their height, their greatest width
ROWS = {"routed": 62, "sorted": 154, "experts": 242, "results": 330, "sums": 420}  # top edge of each row
LINKS = ("sort", "cut", "run", "add")  # between one row and the next
BOX = (RIGHT - LEFT) / MOST_EXPERTS  # width of an expert

CONTROLS = {
    "table": Text("routing table", "13 25 12", 40),
    "experts": Slider("experts", range(2, MOST_EXPERTS + 1), 6),
    "step": Slider("step", range(1, FIRST_RUN + MOST_EXPERTS + 1), 5),
}
PRESETS = {
    "six assignments": {"table": "13 25 12", "experts": 6},
    "one expert takes all": {"table": "2 2 2 2 2 2 2 2", "experts": 4},
    "idle experts": {"table": "04 40 04 40", "experts": 8},
    "k = 1": {"table": "3 0 2 1 3 0 1 2", "experts": 4},
}
STILLS = {
    "added": {"step": FIRST_RUN + 6},
    "one_expert": PRESETS["one expert takes all"] | {"step": FIRST_RUN + 2},
}


@lru_cache(maxsize=64)
def parse(table: str, experts: int) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The experts of each token, k of them for every token, and a remark on what could not be read as it stands."""
    remarks, rows = [], []
    groups = "".join(char if char in "0123456789" else " " for char in table).split()
    if any(not (char.isspace() or char in "0123456789,;/|()[]") for char in table):
        remarks.append("only digits count")
    for group in groups:
        wanted = list(dict.fromkeys(int(digit) for digit in group))
        known = [expert for expert in wanted if expert < experts]
        if len(wanted) < len(group):
            remarks.append("a token visits an expert once")
        if any(expert >= experts for expert in wanted):
            remarks.append(f"experts are 0 to {experts - 1}")
        if len(known) > max(SHARES):
            remarks.append(f"{max(SHARES)} experts for a token are the most")
        if known:
            rows.append(known[: max(SHARES)])
    if not rows:
        return ((0,), (1,)), "no expert found in the table, so 0 1 is shown"
    k = min(map(len, rows))
    if any(len(row) > k for row in rows):
        remarks.append(f"k is the same for all, here {k}")
    most = min(MOST_TOKENS, MOST // k)
    if len(rows) > most:
        remarks.append(f"the first {most} tokens are shown")
    return tuple(tuple(row[:k]) for row in rows[:most]), "; ".join(list(dict.fromkeys(remarks))[:3])


def compute(table: str, experts: int, step: int) -> Result:
    """The dispatch of this table. Token t is the number t, and expert e makes 10 e + t of it: two digits that tell."""
    rows, remark = parse(table, experts)
    topk_idx = torch.tensor(rows)
    tokens, k = topk_idx.shape
    expert_idx = topk_idx.flatten()
    order = expert_idx.argsort(stable=True)
    token = order // k
    sizes = expert_idx.bincount(minlength=experts)
    ends = sizes.cumsum(0)
    weight = torch.tensor(SHARES[k], dtype=torch.float64).repeat(tokens)
    results = 10.0 * expert_idx[order] + token
    y = torch.zeros(tokens, dtype=torch.float64).index_add(0, token, results * weight[order])
    last = FIRST_RUN + experts
    now = min(step, last)
    numbers = {
        "k": k,
        "experts": experts,
        "step": now,
        "last": last,
        "expert_idx": expert_idx.numpy(),
        "order": order.numpy(),
        "token": token.numpy(),
        "sizes": sizes.numpy(),
        "ends": ends.numpy(),
        "weight": weight.numpy(),
        "results": results.numpy(),
        "y": y.numpy(),
    }
    said = f"Step {now} of {last}: {explained(now, numbers)}"
    return Result(numbers, said + (f" Table: {remark}." if remark else ""))


def explained(step: int, n: dict) -> str:
    """What happens in this step, in one sentence or two."""
    k, count = n["k"], len(n["order"])
    if step == 1:
        return f"{several(count // k, 'token')}, k = {k}: {several(count, 'assignment')} in token order."
    if step == 2:
        return f"sorted by expert, weights along: order = {listed(n['order'])}. Assignment a is of token a // {k}."
    if step == 3:
        idle = int((n["sizes"] == 0).sum())
        return f"the sizes are {listed(n['sizes'])}; {several(idle, 'expert')} idle. minlength keeps the zeros."
    if step == 4:
        return f"the running sum of the sizes, {listed(n['ends'])}, tells where each slice ends."
    if step == 5:
        pieces = [f"{e} [{end - size}:{end}]" for e, (size, end) in enumerate(zip(n["sizes"], n["ends"], strict=True))]
        return f"the slices, start inside and end not: {', '.join(pieces)}."
    if step < n["last"]:
        expert = step - FIRST_RUN
        size, end = int(n["sizes"][expert]), int(n["ends"][expert])
        if not size:
            return f"expert {expert} is idle, its slice [{end}:{end}] is empty."
        tokens = listed(n["token"][end - size : end])
        made = listed(f"{expert}{token}" for token in n["token"][end - size : end])
        called = "token" if size == 1 else "tokens"
        return f"expert {expert} runs once, on [{end - size}:{end}], {called} {tokens}; it makes {made}."
    sums = listed(f"{value:.3g}" for value in n["y"])
    calls = several(int((n["sizes"] > 0).sum()), "call")
    return f"each result times its weight is added to its token: y = {sums}. It took {calls}, one for each busy expert."


def several(count: int, noun: str) -> str:
    """ "1 token", "4 tokens"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listed(values) -> str:
    return ", ".join(map(str, values))


CODE = {
    1: "expert_idx = topk_idx.flatten()",
    2: "order = expert_idx.argsort(stable=True);  token = order // k",
    3: "sizes = expert_idx.bincount(minlength={experts})",
    4: "ends = sizes.cumsum(0)",
    5: "expert e gets  token[ends[e] - sizes[e] : ends[e]]",
}


def code(n: dict) -> str:
    """The line of code of this step."""
    if n["step"] in CODE:
        return CODE[n["step"]].format(experts=n["experts"])
    if n["step"] == n["last"]:
        return "y.index_add_(0, token, result * weight[order])"
    expert = n["step"] - FIRST_RUN
    end = int(n["ends"][expert])
    piece = f"[{end - int(n['sizes'][expert])}:{end}]"
    return f"result{piece} = experts[{expert}](x[token{piece}])"


def draw(figure: Figure) -> dict:
    width, height = (100 * side for side in SIZE)
    figure.set_layout_engine("none")  # the axes are the whole picture, in pixels
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.axis("off")
    for row, top in ROWS.items():
        axes.text(8, top + HIGH / 2, row, va="center", fontweight="bold", fontsize=10.5)
    middle = {"ha": "center", "va": "center"}
    small = {"fontsize": 9.5, "color": style.QUIET, **middle}
    cell = {"fontsize": 10, "linespacing": 1.1, **middle}  # two lines in one text: half the drawing

    def texts(row: str, dy: float, many: int = MOST, **look) -> list:
        return [axes.text(LEFT, ROWS[row] + dy, "", **look) for _ in range(many)]

    return {
        "here": axes.add_patch(Rectangle((0, 0), 5, HIGH, facecolor=style.color("highlight"), edgecolor="none")),
        "code": axes.text(8, 16, "", family="DejaVu Sans Mono", fontweight="bold", va="center"),
        "links": {name: axes.add_collection(LineCollection([], linewidths=1.6)) for name in LINKS},
        "cells": {row: axes.add_collection(PolyCollection([])) for row in ROWS},
        "names": texts("routed", -11, MOST_TOKENS, **small),
        "routed": texts("routed", HIGH / 2, **cell),
        "places": texts("sorted", -8, **small),
        "sorted": texts("sorted", HIGH / 2, **cell),
        "experts": texts("experts", HIGH / 2, MOST_EXPERTS, **cell),
        "results": texts("results", HIGH / 2, **cell),
        "sums": texts("sums", HIGH / 2, MOST_TOKENS, fontweight="bold", **middle),
    }


def write(texts: list, places: list, words: list) -> None:
    """The words at these places; the texts that are left over say nothing."""
    for i, text in enumerate(texts):
        there = i < len(words)
        text.set_x(places[i] if there else LEFT)
        text.set_text(words[i] if there else "")


def shade(cells: PolyCollection, row: str, places: list, wide: float, experts: list, strong: int | None) -> None:
    """One cell at each place, in the look of its expert; empty where that is None, strong where it is that expert."""
    top, side = ROWS[row], wide / 2 - 1.5
    corners = ((-side, top), (side, top), (side, top + HIGH), (-side, top + HIGH))
    cells.set_verts([[(place + dx, y) for dx, y in corners] for place in places])
    colors = [style.GRID if e is None else style.color(f"expert {e}") for e in experts]
    depth = [0.0 if e is None else 0.42 if e == strong else 0.16 for e in experts]
    cells.set_facecolor([to_rgba(color, alpha) for color, alpha in zip(colors, depth, strict=True)])
    cells.set_edgecolor(colors)
    cells.set_linewidth([2.4 if e is not None and e == strong else 1.2 for e in experts])
    cells.set_linestyle(["-" if e is None else style.line(f"expert {e}")["linestyle"] for e in experts])


def link(lines: LineCollection, ends: list, experts: list) -> None:
    """A line for each pair of ends, in the look of its expert."""
    lines.set_segments(ends)
    lines.set_color([style.color(f"expert {e}") for e in experts])
    lines.set_linestyle([style.line(f"expert {e}")["linestyle"] for e in experts] or ["-"])


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    k, step, count, experts, order = n["k"], n["step"], len(n["order"]), n["experts"], n["order"].tolist()
    tokens, final = count // k, step == n["last"]
    running = step - FIRST_RUN if FIRST_RUN <= step and not final else None
    of = n["expert_idx"].tolist()  # the expert of each assignment, in token order
    by, visitor = [of[a] for a in order], n["token"].tolist()  # expert and token of each place after the sort
    share, along = ([f"{w:.1f}" for w in weight] for weight in (n["weight"], n["weight"][n["order"]]))
    ran = [final or (running is not None and expert <= running) for expert in by]

    wide = min(WIDEST, (RIGHT - LEFT) / count)
    at = [LEFT + (i + 0.5) * wide for i in range(count)]
    homes = [LEFT + (t + 0.5) * k * wide for t in range(tokens)]
    boxes = [LEFT + (e + 0.5) * BOX for e in range(experts)]

    scene["code"].set_text(code(n))
    row = (
        "sums" if final else ("routed", "sorted", "experts", "experts", "experts", "results")[min(step, FIRST_RUN) - 1]
    )
    scene["here"].set_y(ROWS[row])
    write(scene["names"], homes, [("token " if k > 1 else "t") + str(t) for t in range(tokens)])
    write(scene["routed"], at, [f"{expert}\n{w}" for expert, w in zip(of, share, strict=True)])
    sorted_now = count if step >= 2 else 0
    write(scene["places"], at, [str(i) for i in range(sorted_now)])
    write(scene["sorted"], at, [f"t{token}\n{w}" for token, w in zip(visitor, along, strict=True)][:sorted_now])
    pieces = list(zip(n["sizes"].tolist(), n["ends"].tolist(), strict=True))
    form = {3: lambda size, end: several(size, "token"), 4: lambda size, end: f"end {end}"}
    words = form.get(step, lambda size, end: f"[{end - size}:{end}]") if step >= 3 else lambda size, end: ""
    write(scene["experts"], boxes, [f"expert {e}\n{words(*piece)}" for e, piece in enumerate(pieces)])
    times = [f"\n×{w}" if final else "\n" for w in along]
    made = [f"{e}{t}{w}" if ready else "" for e, t, w, ready in zip(by, visitor, times, ran, strict=True)]
    write(scene["results"], at, made)
    write(scene["sums"], homes, [f"{value:.3g}" for value in n["y"]] if final else [])

    cells = scene["cells"]
    shade(cells["routed"], "routed", at, wide, of, None)
    shade(cells["sorted"], "sorted", at, wide, by if sorted_now else [None] * count, running)
    busy = [e if step >= 3 and size else None for e, (size, _) in enumerate(pieces)]
    shade(cells["experts"], "experts", boxes, BOX, busy, running)
    done = [expert if ready else None for expert, ready in zip(by, ran, strict=True)]
    shade(cells["results"], "results", at, wide, done, running)
    shade(cells["sums"], "sums", homes, k * wide, [None] * tokens, None)
    cells["sums"].set_facecolor(style.HIGHLIGHT_FILL if final else (1, 1, 1, 0))
    cells["sums"].set_edgecolor(style.INK if final else style.GRID)

    sent = [i for i in range(count) if step >= 5 and (running is None or by[i] == running)]
    ways = {  # upper row, lower row, and which places have a line
        "sort": ("routed", "sorted", range(sorted_now), lambda i: (at[order[i]], at[i])),
        "cut": ("sorted", "experts", sent, lambda i: (at[i], boxes[by[i]])),
        "run": ("experts", "results", sent if step >= FIRST_RUN else (), lambda i: (boxes[by[i]], at[i])),
        "add": ("results", "sums", range(count) if final else (), lambda i: (at[i], at[order[i]])),
    }
    for name, (upper, lower, places, ends) in ways.items():
        top, bottom = ROWS[upper] + HIGH, ROWS[lower] - (16 if lower == "sorted" else 0)
        lines = [list(zip(ends(i), (top, bottom), strict=True)) for i in places]
        link(scene["links"][name], lines, [by[i] for i in places])


def explore(**start) -> Explorer:
    """Step through the dispatch of your own routing table: sort, count, cut, run, add back.

    table: for each token the digits of its experts, such as "13 25 12"; start: controls to begin with, for example
    explore(table="0 1 0", experts=2, step=1).
    """
    return Explorer(
        "dispatch",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=SIZE,
        start=start,
    )
