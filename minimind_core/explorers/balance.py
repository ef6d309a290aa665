"""Explorer of notebook 08: a router and its experts in training, with the auxiliary loss on or off."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from matplotlib.figure import Figure

from . import style
from .shell import Choice, Explorer, Result, Slider, Toggle

TOPICS, SEQUENCES, SEQ, HIDDEN, MOST = 4, 8, 8, 8, 8  # MOST: experts
STEPS, SLICE, RATE = 240, 8, 0.02  # a picture after every SLICE steps; of Adam
IDLE = 0.02  # an expert with less of the load counts as idle
WEIGHTS = RAW, EXACT, THROUGH = "p, as it is", "p / sum, exact", "p / sum, straight-through"

CONTROLS = {
    "aux": Toggle("auxiliary loss", False),
    "coefficient": Slider("coefficient", [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0], 0.3),
    "level": Choice("level", ("batch", "sequence"), "batch"),
    "experts": Slider("experts", range(2, MOST + 1), 8),
    "k": Slider("k", range(1, MOST + 1), 1, unit="experts for each token"),
    "weight": Choice("expert's weight", WEIGHTS, RAW),
    "start": Slider("random start", range(10), 0),
}
PRESETS = {
    "aux off": {"aux": False, "k": 1, "weight": RAW},
    "aux on": {"aux": True, "coefficient": 0.3, "level": "batch", "k": 1, "weight": RAW},
    "too large": {"aux": True, "coefficient": 10.0, "level": "batch", "k": 1, "weight": RAW},
    "by sequence": {"aux": True, "coefficient": 0.3, "level": "sequence", "k": 1, "weight": RAW},
    "cannot learn": {"aux": True, "coefficient": 0.01, "level": "batch", "k": 1, "weight": EXACT},
}
STILLS = {name.replace(" ", "_"): values for name, values in PRESETS.items() if name in ("aux on", "cannot learn")}


@lru_cache(maxsize=4)
def task(start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs and targets, both [steps, tokens, hidden], and first weights: router [MOST, hidden], experts [MOST, ...].

    Each sequence has one of four topics. A topic has a direction of its own in the input, and a matrix of its own that
    makes the target from the input: nobody tells the router which. The targets' mean squared length is 1.
    """
    generator = torch.Generator().manual_seed(start)

    def normal(*shape: int) -> np.ndarray:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).numpy()

    directions, common, maps = normal(TOPICS, HIDDEN), normal(HIDDEN), normal(TOPICS, HIDDEN, HIDDEN)
    directions *= 1.5 / np.linalg.norm(directions, axis=1, keepdims=True)
    router, experts = 0.1 * normal(MOST, HIDDEN), 0.3 * normal(MOST, HIDDEN, HIDDEN) / HIDDEN**0.5
    topic = np.arange(SEQUENCES) % TOPICS
    x = 0.5 * normal(STEPS, SEQUENCES, SEQ, HIDDEN) + (common / np.linalg.norm(common) + directions[topic])[:, None]
    y = np.einsum("nstd,sod->nsto", x, maps[topic])
    y /= np.sqrt((y**2).sum(axis=-1).mean())
    flat = STEPS, SEQUENCES * SEQ, HIDDEN
    return x.reshape(flat), y.reshape(flat), router, experts


def step(
    router: np.ndarray,
    experts: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    k: int,
    weight: str,
    coefficient: float,
    level: str,
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, tuple[float, float, float]]:
    """One forward and one backward pass, by hand: some ten times as fast as autograd at this size.

    router: [experts, hidden]; experts: [experts, hidden, hidden], linear; x, y: [tokens, hidden].
    Returns the gradients of both weights, the load of each expert, and (task loss, aux by batch, aux by sequence).
    """
    tokens, count = len(x), len(router)
    logits = x @ router.T
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    chosen = np.zeros_like(probs)
    np.put_along_axis(chosen, np.argsort(-probs, axis=1)[:, :k], 1.0, axis=1)
    scale = 1.0 if weight == RAW else (probs * chosen).sum(axis=1, keepdims=True)
    weights = probs * chosen / scale
    made = (x @ experts.reshape(-1, HIDDEN).T).reshape(tokens, count, HIDDEN)  # by every expert; the weight picks
    off = (weights[:, None] @ made)[:, 0] - y

    by_sequence = chosen.reshape(SEQUENCES, -1, count).mean(axis=1) / k
    mean_probs = probs.reshape(SEQUENCES, -1, count).mean(axis=1)
    load = by_sequence.mean(axis=0)
    aux = count * load @ mean_probs.mean(axis=0), count * (by_sequence * mean_probs).sum() / SEQUENCES

    d_output = 2 * off / tokens
    d_weights = (made @ d_output[:, :, None])[:, :, 0] * chosen
    d_experts = (weights[:, :, None] * d_output[:, None]).reshape(tokens, -1).T @ x
    if weight != RAW and not (weight == THROUGH and k == 1):  # of p / sum; for k = 1 nothing is left
        d_weights = d_weights - (weights * d_weights).sum(axis=1, keepdims=True) * chosen
    f = load if level == "batch" else by_sequence.repeat(tokens // SEQUENCES, axis=0)
    d_probs = d_weights / scale + coefficient * count / tokens * f
    d_logits = probs * (d_probs - (d_probs * probs).sum(axis=1, keepdims=True))
    return (d_logits.T @ x, d_experts.reshape(experts.shape)), load, ((off**2).sum() / tokens, *aux)


def train(experts: int, k: int, weight: str, coefficient: float, level: str, start: int) -> Iterator[tuple]:
    """Adam, one step after the other: yields (load of each expert, (task loss, aux by batch, aux by sequence))."""
    x, y, *first = task(start)
    values = [part[:experts].copy() for part in first]
    means, squares = ([np.zeros_like(value) for value in values] for _ in range(2))
    for now in range(STEPS):
        grads, load, losses = step(*values, x[now], y[now], k, weight, coefficient, level)
        for value, grad, mean, square in zip(values, grads, means, squares, strict=True):
            mean += 0.1 * (grad - mean)
            square += 0.01 * (grad**2 - square)
            moved = mean / (1 - 0.9 ** (now + 1)) / (np.sqrt(square / (1 - 0.99 ** (now + 1))) + 1e-8)
            value -= RATE * moved
        yield load, losses


def by_slice(run: Iterator[tuple]) -> Iterator[np.ndarray]:
    """Means over SLICE steps: the load of each expert, then task loss, aux by batch, aux by sequence."""
    while several := list(islice(run, SLICE)):
        yield np.mean([[*load, *losses] for load, losses in several], axis=0)


@lru_cache(maxsize=128)
def without_aux(experts: int, k: int, weight: str, start: int) -> np.ndarray:
    """The task loss of each slice without the auxiliary loss, for comparison."""
    return np.array([row[-3] for row in by_slice(train(experts, k, weight, 0.0, "batch", start))])


def words(rows: np.ndarray, baseline: np.ndarray, k: int, unused: str) -> str:
    """What the rows so far say: means over the last five slices. unused: the settings of a loss that is off."""
    last = rows[-5:].mean(axis=0)
    load, (loss, batch, sequence) = last[:-3], last[-3:]
    idle = (load < IDLE).sum()
    text = f"After {len(rows) * SLICE} steps, {k} of {len(load)} experts for each token: the busiest takes "
    text += f"{load.max():.0%} of the load, the least busy {load.min():.0%}; {idle or 'no'} "
    text += f"{'expert is' if idle == 1 else 'experts are'} idle (below {IDLE:.0%}). Task loss {loss:.2f}"
    if not unused:
        text += f" ({baseline[: len(rows)][-5:].mean():.2f} without auxiliary loss)"
    text += f". Auxiliary loss {batch:.2f} over the batch, {sequence:.2f} by sequence"
    return text + (f"; it is off, so {unused} is not used." if unused else ".")


def work(
    aux: bool, coefficient: float, level: str, experts: int, k: int, weight: str, start: int
) -> Iterator[tuple[float, Result]]:
    """Train; yield (share done, Result) after every SLICE steps. More than `experts` cannot be chosen."""
    k = min(k, experts)
    baseline = without_aux(experts, k, weight, start)
    unused = "" if aux else f"coefficient {coefficient:g} by {level}"
    rows = []
    for row in by_slice(train(experts, k, weight, coefficient if aux else 0.0, level, start)):
        rows.append(row)
        seen = np.array(rows)
        numbers = {"load": seen[:, :experts], "task": seen[:, -3], "batch": seen[:, -2], "sequence": seen[:, -1]}
        numbers |= {"baseline": baseline, "on": aux}
        yield len(rows) * SLICE / STEPS, Result(numbers, words(seen, baseline, k, unused))


def draw(figure: Figure) -> dict:
    """Three panels over the steps: shares of the load, task loss, auxiliary loss. Returns what moves."""
    grid = figure.add_gridspec(2, 2, width_ratios=(1.35, 1))
    shares, loss, aux = (figure.add_subplot(grid[place]) for place in ((slice(None), 0), (0, 1), (1, 1)))
    scene = {}

    shares.set(title="Load: each expert's share", xlabel="step", xlim=(0, STEPS * 1.1), ylim=(0, 1))
    shares.set(xticks=range(0, STEPS + 1, 60), yticks=[0, 0.25, 0.5, 0.75, 1])
    shares.grid(False)
    scene["bands"] = [
        shares.fill_between([0, 1], [0, 0], [1, 1], **style.fill(f"expert {expert}")) for expert in range(MOST)
    ]
    scene["names"] = [style.label(shares, STEPS * 1.02, 0.5, str(expert), f"expert {expert}") for expert in range(MOST)]

    loss.set(title="Task loss", xlim=(0, STEPS), ylim=(0, 1.15), xticks=range(0, STEPS + 1, 60))
    loss.set(yticks=[0, 0.5, 1], xticklabels=[])
    (baseline,) = loss.plot([], [], **style.line("before"))
    (scene["task"],) = loss.plot([], [], **style.line("after"), linewidth=2.5)
    keys = []
    for height, meaning, name in ((1.0, "after", "this run"), (0.82, "before", "without aux")):
        keys += loss.plot([100, 122], [height, height], **style.line(meaning))
        keys.append(style.label(loss, 127, height, name, meaning))
    scene["baseline"] = [baseline, *keys[2:]]  # a line, its key and its name

    aux.set(title="Auxiliary loss", xlabel="step", xlim=(0, STEPS), ylim=(0, 8.3), xticks=range(0, STEPS + 1, 60))
    aux.set_yticks([0, 1, 2, 4, 6, 8])
    aux.axhline(1, **style.line("reference"), linewidth=1)
    for height, meaning, name in ((7.4, "norm", "by sequence"), (6.0, "gate", "over the batch")):
        level = name.split()[-1]
        (scene[level],) = aux.plot([], [], **style.line(meaning))
        aux.plot([100, 122], [height, height], **style.line(meaning))
        style.label(aux, 127, height, name, meaning)
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers = result.numbers
    load = numbers["load"]
    middles = (np.arange(len(load)) + 0.5) * SLICE
    edges = np.concatenate([[0], middles[1:-1], [len(load) * SLICE]]) if len(load) > 1 else np.array([0, SLICE])
    shown = load if len(load) > 1 else load.repeat(2, axis=0)
    tops = np.cumsum(shown, axis=1)
    for expert, (band, name) in enumerate(zip(scene["bands"], scene["names"], strict=True)):
        there = expert < load.shape[1]
        band.set_visible(there)
        name.set_visible(there and load[-1, expert] > 0.05)
        if there:
            low = tops[:, expert] - shown[:, expert]
            band.set_data(edges, low, tops[:, expert])
            name.set_position((edges[-1] + 0.02 * STEPS, (low[-1] + tops[-1, expert]) / 2))
    for key in ("task", "batch", "sequence"):
        scene[key].set_data(middles, numbers[key])
    whole = (np.arange(len(numbers["baseline"])) + 0.5) * SLICE
    scene["baseline"][0].set_data(whole, numbers["baseline"])
    for artist in scene["baseline"]:
        artist.set_visible(numbers["on"])


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with, named as in CONTROLS."""
    return Explorer(
        "balance",
        controls=CONTROLS,
        presets=PRESETS,
        work=work,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.4),
        start=start,
    )
