"""Explorer of notebook 14: the learning rate of every update, up to the planned end and beyond it."""

import math
from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure

from ..training import cosine_learning_rate
from . import style
from .shell import Choice, Explorer, Result, Slider, log

MOST = 1000  # updates shown
STAYS, BARE = ENDS = ("stays at 10 %", "bare formula")
UPDATES, MICRO, MIXED = COUNTS = ("updates", "micro-batches", "micro-batches, but not T")
PARTS = {"warm-up": "norm", "cosine": "after", "after the end": "wrong"}  # of the run, and how each is drawn

CONTROLS = {
    "base": Slider("base rate", log(1e-5, 1e-1, 10), 5e-4),
    "warm_up": Slider("warm-up", range(0, 201, 5), 0, unit="updates"),
    "steps": Slider("planned end T", range(250, 751, 10), 500, unit="updates"),
    "done": Slider("trained until", range(10, MOST + 1, 10), 600, unit="updates"),
    "after": Choice("after the end", ENDS, STAYS),
    "counts": Choice("t counts", COUNTS, UPDATES),
    "accumulation": Slider("accumulation", range(1, 17), 4, unit="micro-batches in an update"),
    "update": Slider("look at update", range(1, MOST + 1), 300),
}
PRESETS = {
    "MiniMind": {"base": 5e-4, "warm_up": 0, "after": BARE, "counts": MICRO, "accumulation": 8, "done": 500},
    "with warm-up": {"base": 3e-3, "warm_up": 50, "after": STAYS, "counts": UPDATES, "done": 500},
    "climbs back": {"warm_up": 0, "steps": 500, "done": 1000, "after": BARE, "counts": UPDATES, "update": 1000},
    "counted wrongly": {"steps": 500, "done": 500, "after": BARE, "counts": MIXED, "accumulation": 4, "update": 250},
}
STILLS = {name.replace(" ", "_"): PRESETS[name] for name in ("climbs back", "counted wrongly")}


def share(t: int, total: int, warm_up: int, after: str) -> float:
    """The rate as a share of the base, at place t of a plan of `total`; all three in the same unit.

    "bare formula" leaves out the line that lets t end at the total: the cosine goes on.
    """
    if after == BARE and t > total:
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (t - warm_up) / (total - warm_up)))
    return cosine_learning_rate(t, total, 1.0, warm_up)


def shares(steps: int, warm_up: int, after: str, counts: str, accumulation: int) -> np.ndarray:
    """The share that each of the MOST updates trains at: [updates].

    Counted in micro-batches, an update takes the rate of its last one; MiniMind counts them from 1.
    """
    if counts == UPDATES:
        return np.array([share(u, steps, warm_up, after) for u in range(MOST)])
    places = range(accumulation, accumulation * MOST + 1, accumulation)
    unit = accumulation if counts == MICRO else 1  # of the plan: micro-batches too, or still updates
    return np.array([share(t, steps * unit, warm_up * unit, after) for t in places])


def compute(
    base: float, warm_up: int, steps: int, done: int, after: str, counts: str, accumulation: int, update: int
) -> Result:
    """Rates, and their sums over the parts of the run: a sum of 1 is one update at the full base rate."""
    every = shares(steps, warm_up, after, counts, accumulation)
    edges = [0, min(warm_up, done), min(steps, done), done]
    sums = [every[start:end].sum() for start, end in pairwise(edges)]
    part = "in the warm-up" if update <= warm_up else "before the end" if update <= steps else "after the end"
    words = (
        f"Update {update}, {part}, has rate {base * every[update - 1]:.3g}: {every[update - 1]:.1%} of the base. "
        f"{done} updates ({done * accumulation} micro-batches) weigh as much as {sum(sums):.0f} at the full base "
        f"rate, a sum of {base * sum(sums):.3g}"
    )
    words += f"; {sums[2] / sum(sums):.0%} of it comes after the planned end." if done > steps else "."
    return Result({"shares": every, "edges": edges, "sums": sums, "update": update, "base": base, "end": steps}, words)


def draw(figure: Figure) -> dict:
    """The rate over the updates, and bars of the sums. Returns what moves."""
    curve, bars = figure.subplots(1, 2, width_ratios=(1.9, 1))
    curve.set(title="Rate, as a share of the base", xlabel="update", xlim=(0, MOST), ylim=(0, 1.19))
    curve.set(xticks=range(0, MOST + 1, 250), yticks=[0, 0.1, 0.25, 0.5, 0.75, 1])
    curve.set_yticklabels(["0", "10 %", "25 %", "50 %", "75 %", "100 %"])
    scene = {"areas": [curve.fill_between([0, 1], [0, 0], [0, 0], **style.fill(look)) for look in PARTS.values()]}
    (scene["plan"],) = curve.plot([], [], **style.line("before"), linewidth=1)
    (scene["rate"],) = curve.plot([], [], color=style.color("residual"), linewidth=1.6)
    (scene["end"],) = curve.plot([], [], **style.line("reference"), linewidth=1.5)
    scene["end_label"] = style.label(curve, 0, 1.12, "planned end T", "reference", ha="center")
    (scene["point"],) = curve.plot([], [], **style.points("highlight"), markersize=13, zorder=5)
    scene["value"] = style.label(curve, 0, 0, "", "highlight", ha="center", zorder=6)

    bars.set(title="Sum of the rates", xlabel="updates at the base rate", xlim=(0, 1000), ylim=(2.6, -0.8))
    bars.set(xticks=[0, 500, 1000], yticks=[])
    bars.grid(False, axis="y")
    scene["bars"] = [
        bars.barh(row + 0.1, 0, height=0.42, **style.fill(look)) for row, look in enumerate(PARTS.values())
    ]
    scene["names"] = [style.label(bars, 0, row - 0.3, name, look) for row, (name, look) in enumerate(PARTS.items())]
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers = result.numbers
    every, edges, now = numbers["shares"], numbers["edges"], numbers["update"]
    x = np.arange(MOST + 1) + 0.5
    last = np.append(every, every[-1])
    for area, start, end in zip(scene["areas"], edges, edges[1:], strict=False):
        area.set_data(x[start : end + 1], 0 * x[start : end + 1], last[start : end + 1])
    scene["plan"].set_data(x[:-1], every)
    scene["rate"].set_data(x[: edges[-1]], every[: edges[-1]])
    scene["end"].set_data([numbers["end"]] * 2, [0, 1.06])
    scene["end_label"].set_x(numbers["end"])
    scene["point"].set_data([now - 0.5], [every[now - 1]])
    scene["value"].set_text(f"{numbers['base'] * every[now - 1]:.3g}")
    height = every[now - 1] + (0.09 if every[now - 1] < 0.8 else -0.1)
    scene["value"].set_position((min(max(now, 70), MOST - 70), height))
    for bar, name, label, value in zip(scene["bars"], scene["names"], PARTS, numbers["sums"], strict=True):
        bar[0].set_width(value)
        name.set_text(f"{label}: {value:.1f}" if 0 < value < 10 else f"{label}: {value:.0f}")


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with, named as in CONTROLS."""
    return Explorer(
        "schedule",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 3.6),
        start=start,
    )
