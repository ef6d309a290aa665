"""Explorer of notebook 02: one pair of a query and of a key on its circle, the score, and the table of cosines."""

import math
from functools import lru_cache

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ..rope import apply_rotary_pos_emb, precompute_freqs_cis, rope_frequencies
from . import style
from .shell import Explorer, Result, Slider, log

POSITIONS = 512  # columns of the table, and the longest distance drawn
CONTROLS = {
    "position": Slider("key position", range(256), 3, unit="tokens"),
    "offset": Slider("offset", range(256), 9, unit="tokens"),
    "pair": Slider("pair", range(64), 6),
    "base": Slider("base", log(1e2, 1e8, 4), 1e6),
    "head_dim": Slider("head_dim", range(4, 129, 2), 96, snap=True),
}
PRESETS = {
    "MiniMind-3": {"base": 1e6, "head_dim": 96},
    "Llama-3": {"base": 5e5, "head_dim": 128},
    "Llama-2": {"base": 1e4, "head_dim": 128},
    "RoFormer": {"base": 1e4, "head_dim": 64},
    "small": {"base": 1e2, "head_dim": 8, "pair": 1},
}
STILLS = {"fast": {"pair": 0}, "llama_2": {"base": 1e4, "head_dim": 128}}


@lru_cache(maxsize=4)
def turned_to_all(base: float, head_dim: int) -> torch.Tensor:
    """[position, head_dim]: the vector that is (1, 0) in every pair, turned to each position by the core's function."""
    cos, sin = precompute_freqs_cis(head_dim, POSITIONS, base)
    start = torch.cat([torch.ones(head_dim // 2), torch.zeros(head_dim // 2)]).expand(1, POSITIONS, 1, head_dim)
    return apply_rotary_pos_emb(start, start, cos, sin)[0][0, :, 0]


def compute(position: int, offset: int, pair: int, base: float, head_dim: int) -> Result:
    """Arrows, scores and table for a key at `position` and a query `offset` tokens later."""
    pairs, query = head_dim // 2, position + offset
    chosen = min(pair, pairs - 1)
    theta = rope_frequencies(head_dim, base)[chosen].item()
    turned = turned_to_all(base, head_dim)
    arrows = torch.stack([turned[:, chosen], turned[:, chosen + pairs]], dim=-1)
    score = (turned[query] @ turned[position]).item() / pairs
    numbers = {
        "key": arrows[position].numpy(),
        "query": arrows[query].numpy(),
        "steps": arrows[position : query + 1].numpy(),
        "key_angle": position * theta % math.tau,
        "between": offset * theta % math.tau,
        "position": position,
        "offset": offset,
        "pair": chosen,
        "pairs": pairs,
        "own": (arrows @ arrows[0]).numpy(),
        "own_score": (arrows[query] @ arrows[position]).item(),
        "all": (turned @ turned[0]).numpy() / pairs,
        "score": score,
        "table": turned[:, :pairs].T.numpy(),
    }
    capped = f" ({pair} is beyond the last one)" if chosen != pair else ""
    sentence = (
        f"Pair {chosen}{capped} turns {math.degrees(theta):.3g}° per token, once around in {wavelength(theta)} tokens. "
        f"Key at {position}, query at {query}, {offset} apart: an angle of {math.degrees(numbers['between']):.0f}°, "
        f"score {numbers['own_score']:.2f}. The mean of all {pairs} pairs is {score:.2f}."
    )
    return Result(numbers, sentence)


def wavelength(theta: float) -> str:
    """Tokens for one full turn, in words: one digit after the point if short, whole tokens if long."""
    tokens = math.tau / theta
    return f"{tokens:.1f}" if tokens < 100 else f"{tokens:,.0f}"


def draw(figure: Figure) -> dict:
    plane, score, table = figure.subplot_mosaic(
        [["plane", "score"], ["plane", "table"]], width_ratios=[1, 1.15], height_ratios=[1, 1]
    ).values()
    plane.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title="One pair, one circle")
    plane.set(xlabel="first number of the pair", ylabel="second number", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    turn = torch.linspace(0, math.tau, 200)
    plane.plot(turn.cos(), turn.sin(), color=style.QUIET, linewidth=1)
    arrow = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.014}
    scene = {
        "angle": plane.plot([], [], color=style.INK, linewidth=1.5)[0],
        "steps": plane.plot([], [], ".", color=style.QUIET, markersize=5)[0],
        "key": plane.quiver(0, 0, 1, 0, color=style.color("key"), **arrow),
        "query": plane.quiver(0, 0, 1, 0, color=style.color("query"), **arrow),
        "key_tip": plane.plot([], [], **style.points("key"))[0],
        "query_tip": plane.plot([], [], **style.points("query"))[0],
        "key_text": style.label(plane, 0, 0, "", "key", ha="center"),
        "query_text": style.label(plane, 0, 0, "", "query", ha="center"),
        "angle_text": style.label(plane, 0, -1.2, "", "residual", ha="center"),
    }

    score.set(xlim=(0, POSITIONS), ylim=(-1.1, 1.1), title="Score against distance", xlabel="distance in tokens")
    score.axhline(0, color=style.QUIET, linewidth=0.8)
    scene |= {
        "own": score.plot([], [], color=style.color("gate"), linewidth=1)[0],
        "all": score.plot([], [], color=style.INK, linewidth=1.5)[0],
        "own_dot": score.plot([], [], **style.points("gate"))[0],
        "all_dot": score.plot([], [], **style.points("residual"))[0],
        "own_text": style.label(score, 500, -0.9, "", "gate", ha="right"),
        "all_text": style.label(score, 500, 0.9, "mean of all pairs", "residual", ha="right"),
    }

    table.set(title="cos table: red 1, blue -1", xlabel="position", ylabel="pair")
    table.grid(False)
    table.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    seen = {"path_effects": [withStroke(linewidth=4, foreground="white")]}  # lines stay visible on dark red and blue
    scene |= {
        "table": table.imshow([[0]], aspect="auto", extent=(-0.5, POSITIONS - 0.5, 47.5, -0.5)),
        "row": table.plot([], [], color=style.INK, linewidth=1.5, **seen)[0],
        "key_line": table.plot([], [], **style.line("key"), **seen)[0],
        "query_line": table.plot([], [], **style.line("query"), **seen)[0],
        "axes": table,
    }
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    arc = torch.linspace(n["key_angle"], n["key_angle"] + n["between"], 90)
    scene["angle"].set_data(0.35 * arc.cos(), 0.35 * arc.sin())
    scene["angle_text"].set_text(f"angle between: {math.degrees(n['between']):.0f}°")
    scene["steps"].set_data(*n["steps"].T)
    near = n["key"] @ n["query"] > 0.9  # the two names would cover each other: one goes outside, one inside
    for name, radius in (("key", 0.72 if near else 1.17), ("query", 1.17)):
        x, y = n[name]
        scene[name].set_UVC(x, y)
        scene[f"{name}_tip"].set_data([x], [y])
        scene[f"{name}_text"].set_position((x * radius, y * radius))
        scene[f"{name}_text"].set_text(name)

    distance = range(POSITIONS)
    scene["own"].set_data(distance, n["own"])
    scene["all"].set_data(distance, n["all"])
    scene["own_dot"].set_data([n["offset"]], [n["own_score"]])
    scene["all_dot"].set_data([n["offset"]], [n["score"]])
    scene["own_text"].set_text(f"pair {n['pair']}")

    bottom = n["pairs"] - 0.5
    scene["table"].set_data(colormaps[style.DIVERGING]((n["table"] + 1) / 2, bytes=True))  # colors draw faster
    if scene["table"].get_extent()[2] != bottom:
        scene["table"].set_extent((-0.5, POSITIONS - 0.5, bottom, -0.5))
        style.limits(scene["axes"], y=(bottom, -0.5))
    scene["row"].set_data([-0.5, POSITIONS - 0.5], [n["pair"]] * 2)
    scene["key_line"].set_data([n["position"]] * 2, [-0.5, bottom])
    scene["query_line"].set_data([n["position"] + n["offset"]] * 2, [-0.5, bottom])


def explore(**start) -> Explorer:
    """Turn one pair of a query and a key, see the score at every distance and the table of cosines.

    The vector turned is (1, 0) in every pair, for query and key alike, so the scores shown are cosines.
    start: controls to begin with, for example explore(pair=0).
    """
    return Explorer(
        "rope",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.2),
        start=start,
    )
