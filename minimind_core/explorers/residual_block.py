"""Explorer of notebook 07: a stack of residual blocks, its stream going up and its gradient coming down."""

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from . import style
from .shell import Choice, Explorer, Result, Slider, linear, log

WIDTH, INSIDE, TOKENS, DEEPEST = 32, 96, 8, 16  # of the small stack: hidden, intermediate, seq, most blocks
STD = 0.02 * math.sqrt(768 / WIDTH)  # a matrix of this width then stretches as much as one of MiniMind's
PLACEMENTS = {"pre-norm": "after", "post-norm": "norm", "no norm": "before"}  # and how each is drawn
FLOORS, CEILINGS = (1e-3, 1e-9), (1e3, 1e5)  # of the two pictures: rms, gradient; what lies beyond is drawn here

CONTROLS = {
    "placement": Choice("norm", tuple(PLACEMENTS), "pre-norm"),
    "depth": Slider("depth", range(1, DEEPEST + 1), 8, unit="blocks"),
    "scale": Slider("initial scale", log(0.25, 4, 10 / math.log10(16)), 1.0),
    "start": Slider("embedding's rms", log(0.01, 1, 10), 0.02),
    "cancel": Slider("x cancelled", linear(0, 1, 0.1), 0.0),
}
PRESETS = {
    "MiniMind-3": {"placement": "pre-norm", "depth": 8, "scale": 1.0, "start": 0.02, "cancel": 0.0},
    "post-norm": {"placement": "post-norm", "depth": 12, "scale": 2.0, "start": 1.0, "cancel": 0.0},
    "deep pre-norm": {"placement": "pre-norm", "depth": 16, "scale": 2.0, "start": 1.0, "cancel": 0.0},
    "no norm, large": {"placement": "no norm", "depth": 12, "scale": 2.0, "start": 1.0, "cancel": 0.0},
    "identity cancelled": {"placement": "no norm", "depth": 8, "scale": 0.25, "start": 1.0, "cancel": 0.9},
}
STILLS = {"post_norm": PRESETS["post-norm"], "identity_cancelled": PRESETS["identity cancelled"]}


@lru_cache
def weights(scale: float) -> list[tuple[torch.Tensor, ...]]:
    """For each block q, k and v in one; o; gate and up in one; down. Normal, deviation scale * STD, always the same."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3 * WIDTH, WIDTH), (WIDTH, WIDTH), (2 * INSIDE, WIDTH), (WIDTH, INSIDE)
    return [tuple(scale * STD * torch.randn(shape, generator=generator) for shape in shapes) for _ in range(DEEPEST)]


@lru_cache
def ends() -> tuple[torch.Tensor, torch.Tensor]:
    """(what enters the stack, rms 1; the gradient that enters at its top, length 1), each [seq, hidden]."""
    x, grad = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    return x / x.square().mean().sqrt(), grad / grad.norm()


HIDDEN_KEYS = torch.full((TOKENS, TOKENS), -math.inf).triu(1)


def attention(x: torch.Tensor, qkv: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """Causal attention of one head, without QK-norm and positions. x: [batch, seq, hidden] -> the same shape."""
    q, k, v = F.linear(x, qkv).chunk(3, dim=-1)
    scores = torch.baddbmm(HIDDEN_KEYS, q, k.mT, alpha=WIDTH**-0.5)
    return F.linear(scores.softmax(dim=-1) @ v, o)


def feed_forward(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """SwiGLU. x: [batch, seq, hidden] -> the same shape."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


@lru_cache(maxsize=64)
def profiles(depth: int, scale: float, start: float, cancel: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A forward and a backward pass through all three stacks at once, float32; may overflow.

    Returns rms of the stream and size of its gradient, both [placement, depth + 1], from the embedding upwards, and
    rms of what each block adds, [placement, depth].
    """
    pre, post = torch.eye(len(PLACEMENTS))[:2, :, None, None]

    def norm(x, here):  # x / rms where here is 1, x where it is 0
        return x / torch.addcmul(1 - here, here * WIDTH**-0.5, torch.linalg.vector_norm(x, dim=-1, keepdim=True))

    entering, grad = ends()
    stream = [(start * entering).repeat(len(PLACEMENTS), 1, 1).requires_grad_()]
    for qkv, o, gate_up, down in weights(scale)[:depth]:
        x = norm(stream[-1] + attention(norm(stream[-1], pre), qkv, o), post)
        x = torch.add(feed_forward(norm(x, pre), gate_up, down), x, alpha=1 - cancel)
        stream.append(norm(x, post))
    arrived = torch.autograd.grad(stream[-1], stream, grad.expand(len(PLACEMENTS), -1, -1))
    with torch.no_grad():
        x, grads = torch.stack(stream, dim=1), torch.stack(arrived, dim=1)
        rms, sizes, added = (v.square().mean((-2, -1)).sqrt().numpy() for v in (x, grads, x.diff(dim=1)))
    return rms, sizes * math.sqrt(grad.numel()), added


def capped(values: np.ndarray, floor: float, ceiling: float) -> np.ndarray:
    """What is not finite counts as too large."""
    return np.clip(np.nan_to_num(values, nan=ceiling, posinf=ceiling), floor, ceiling)


def compute(placement: str, depth: int, scale: float, start: float, cancel: float) -> Result:
    """Stream and gradient at every block, for all placements; the sentence is about the chosen one."""
    rms, grads, added = profiles(depth, scale, start, cancel)
    chosen = list(PLACEMENTS).index(placement)
    own = rms[chosen]
    words = f"{placement.capitalize()}, {depth} {'block' if depth == 1 else 'blocks'}: "
    if np.isfinite(own).all():
        words += f"the rms of the stream goes from {own[0]:.2g} to {own[-1]:.2g}"
        if placement == "pre-norm" and not cancel:
            words += f"; the last block adds {added[chosen, -1] / own[-1]:.0%} of it"
        words += ". "
    else:
        words += f"the stream overflows float32 in block {np.isfinite(own).argmin()}; then there is no gradient. "
    if np.isfinite(grads[chosen]).all():
        first = f"{grads[chosen, 1]:.2g} reaches the first block's output and {grads[chosen, 0]:.2g} the embedding"
        words += f"Of a gradient of 1 at the top, {first}. "
    if cancel:
        words += f"Each feed-forward takes {cancel:.2g} x away. "
    numbers = {
        "chosen": chosen,
        "rms": capped(rms, FLOORS[0], CEILINGS[0]),
        "grad": capped(grads, FLOORS[1], CEILINGS[1]),
        "added": capped(added[chosen], FLOORS[0], CEILINGS[0]),
        "lost": ~np.isfinite(grads).all(axis=1),
    }
    kept = ~numbers["lost"]
    if not (np.array_equal(numbers["rms"], rms) and np.array_equal(numbers["grad"][kept], grads[kept])):
        words += "What lies beyond a picture is drawn at its edge."
    return Result(numbers, words.strip())


def draw(figure: Figure) -> dict:
    """Two panels over the blocks: rms of the stream, size of its gradient. Returns what moves."""
    panels = dict(zip(("rms", "grad"), figure.subplots(1, 2), strict=True))
    scene = {}
    for (name, axes), floor, ceiling in zip(panels.items(), FLOORS, CEILINGS, strict=True):
        axes.set(yscale="log", ylim=(floor / 2, ceiling * 2), xlim=(-0.4, DEEPEST + 0.4), xlabel="blocks passed")
        axes.set_xticks(range(0, DEEPEST + 1, 4))
        axes.minorticks_off()
        axes.axhline(1, **style.line("reference"), linewidth=1)
        scene[name] = [axes.plot([], [], **style.line(look))[0] for look in PLACEMENTS.values()]
        scene[f"{name} points"] = [
            axes.plot([], [], **style.points(look), markersize=5)[0] for look in PLACEMENTS.values()
        ]
    panels["rms"].set_title("Up: rms of the stream")
    panels["grad"].set_title("Down: gradient that arrives")
    (scene["added"],) = panels["rms"].plot([], [], **style.points("highlight"), markersize=6)
    (scene["enters"],) = panels["grad"].plot([], [], **style.points("highlight"), markersize=13)
    keys = [
        panels["rms"].plot([], [], label=name, **style.line(look, marker=True), markersize=5)[0]
        for name, look in PLACEMENTS.items()
    ]
    keys += panels["rms"].plot([], [], label="added by a block", **style.points("highlight"))
    figure.legend(handles=keys, loc="outside upper center", ncols=4, handlelength=2.8)
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers = result.numbers
    for name in ("rms", "grad"):
        for i, values in enumerate(numbers[name]):
            own, shown = i == numbers["chosen"], (range(len(values)), values)
            if name == "grad" and numbers["lost"][i]:
                shown = [], []  # a stream that overflowed sends nothing back
            scene[name][i].set(data=shown, linewidth=2.5 if own else 1.2, alpha=1 if own else 0.6)
            scene[f"{name} points"][i].set_data(shown if own else ([], []))
    added = numbers["added"]
    scene["added"].set_data(np.arange(len(added)) + 0.5, added)
    scene["enters"].set_data([len(added)], [1])


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with: placement, depth, scale, start, cancel."""
    return Explorer(
        "residual_block",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 3.9),
        start=start,
    )
