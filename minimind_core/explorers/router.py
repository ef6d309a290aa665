"""Explorer of notebook 08: where a router sends its tokens, what the auxiliary loss says of it, and where it pushes."""

import numpy as np
import torch
from matplotlib.figure import Figure

from ..moe import load_balancing_loss
from . import style
from .shell import Choice, Explorer, Result, Slider, linear, log

SEQUENCES, LONGEST, MOST = 4, 128, 8  # MOST: experts
NOISE = torch.randn(
    SEQUENCES, LONGEST, MOST, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)  # what makes one token's logits differ from another's
SMALL = 1e-5  # a push below this is drawn without its head, and nearly nothing
HAIR = 1e-3  # by so much a token prefers its own expert to a runner-up
LEVELS = {"batch": "after", "sequence": "norm"}  # and how each is drawn
FAVORITE, TOPICS, RUNNERS_UP = PREFERENCES = ("one favorite", "by topic", "runners-up")

CONTROLS = {
    "preference": Choice("preference", PREFERENCES, FAVORITE),
    "skew": Slider("skew", linear(0, 10, 0.25), 1.0),
    "temperature": Slider("temperature", log(0.1, 10, 10), 1.0),
    "experts": Slider("experts", range(2, MOST + 1), 4),
    "k": Slider("k", range(1, MOST + 1), 1, unit="experts for each token"),
    "tokens": Slider("tokens a sequence", [1, 2, 4, 8, 16, 32, 64, LONGEST], 32),
    "coefficient": Slider("coefficient", log(1e-4, 1, 10), 0.01),
}
PRESETS = {
    "balanced": {"preference": FAVORITE, "skew": 0.0, "temperature": 1.0, "k": 1, "tokens": 128},
    "collapsed": {"preference": FAVORITE, "skew": 8.75, "temperature": 2.0, "experts": 8, "k": 1},
    "below one": {"preference": RUNNERS_UP, "skew": 8.0, "temperature": 1.0, "experts": 4, "k": 1},
    "by topic": {"preference": TOPICS, "skew": 6.0, "temperature": 1.0, "experts": 4, "k": 1},
}
STILLS = {"collapsed": PRESETS["collapsed"], "below_one": PRESETS["below one"]}


def router_logits(preference: str, skew: float, temperature: float, experts: int, k: int, tokens: int) -> torch.Tensor:
    """[sequence, tokens, experts], float64.

    one favorite: noise, and `skew` more for expert 0. by topic: noise, and `skew` more for a sequence's own expert(s).
    runners-up: no noise; the lower half of the experts divides the tokens, each k of them; a token gives its own
    experts a hair more than the upper half, and `skew` less to the rest of the lower half.
    """
    expert, sequence = torch.arange(experts), torch.arange(SEQUENCES)[:, None, None]
    noise = NOISE[:, :tokens, :experts]
    if preference == FAVORITE:
        logits = noise + skew * (expert == 0)
    elif preference == TOPICS:
        logits = noise + skew * ((expert - sequence) % min(experts, SEQUENCES) == 0)
    else:
        half = experts // 2
        count = sequence * tokens + torch.arange(tokens)[:, None]
        own = (expert < half) & ((expert - k * count) % half < k)
        rest = (expert < half) & ~own
        logits = HAIR * own - skew * rest - HAIR**2 * expert  # the last: no two are equal
    return logits / temperature


def compute(
    preference: str, skew: float, temperature: float, experts: int, k: int, tokens: int, coefficient: float
) -> Result:
    """Load and mean probability of each expert, both auxiliary losses, and their push on the first sequence's logits.

    More than `experts` cannot be chosen.
    """
    k = min(k, experts)
    logits = router_logits(preference, skew, temperature, experts, k, tokens)
    shift = torch.zeros(experts, dtype=torch.float64, requires_grad=True)  # of all logits of the first sequence
    probs = torch.cat([logits[:1] + shift, logits[1:]]).softmax(dim=-1)
    chosen = probs.topk(k, dim=-1).indices
    losses = [load_balancing_loss(probs, chosen, level=level) for level in LEVELS]
    pushes = [-coefficient * torch.autograd.grad(loss, shift, retain_graph=True)[0].numpy() for loss in losses]

    counts = torch.zeros_like(probs).scatter(-1, chosen, 1.0).sum(dim=1).numpy()
    load, by_sequence = counts.sum(axis=0) / (SEQUENCES * tokens * k), counts / (tokens * k)
    batch, sequence = (loss.item() for loss in losses)
    idle = (load == 0).sum()
    words = (
        f"{SEQUENCES * tokens} tokens, {k} of {experts} experts each. Expert {load.argmax()} takes {load.max():.0%} of "
        f"the load; {idle or 'none'} {'is' if idle < 2 else 'are'} idle. Auxiliary loss {batch:.2f} over the batch, "
        f"{sequence:.2f} by sequence; times the coefficient {coefficient * batch:.2g} and {coefficient * sequence:.2g}."
    )
    most = np.abs(pushes).max(axis=1)
    words += f" Largest push {_short(most[0])} and {_short(most[1])}."
    numbers = {
        "load": load,
        "by_sequence": by_sequence,
        "probability": probs.detach().mean(dim=(0, 1)).numpy(),
        "aux": [batch, sequence],
        "push": np.array(pushes),
    }
    return Result(numbers, words)


def _short(value: float) -> str:
    """Two digits, and 0 for what is only rounding."""
    return f"{value:.2g}" if value > 1e-9 else "0"


def draw(figure: Figure) -> dict:
    """Three panels: load and probability of each expert, both losses, the push on the logits. Returns what moves."""
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1), height_ratios=(1, 1.9))
    shares, aux, push = (figure.add_subplot(grid[place]) for place in ((slice(None), 0), (0, 1), (1, 1)))
    scene = {}

    shares.set(title="Load f (filled) and probability P", xlabel="expert", xlim=(-0.6, MOST - 0.4), ylim=(0, 1.24))
    shares.set(xticks=range(MOST), yticks=[0, 0.25, 0.5, 0.75, 1])
    shares.grid(False, axis="x")
    looks = [style.fill(f"expert {expert}") for expert in range(MOST)]
    scene["load"] = [shares.bar(i - 0.2, 0, width=0.38, **look) for i, look in enumerate(looks)]
    scene["probability"] = [
        shares.bar(i + 0.2, 0, width=0.38, facecolor="white", edgecolor=look["edgecolor"], linewidth=1.8)
        for i, look in enumerate(looks)
    ]
    (scene["dots"],) = shares.plot([], [], **style.points("residual"), markersize=3.5, clip_on=False)
    (scene["even"],) = shares.plot([], [], **style.line("reference"), linewidth=1.5)
    for height, words in ((1.18, "dots: load in each of the 4 sequences"), (1.1, "dotted: the even share")):
        shares.text(MOST - 0.5, height, words, ha="right", va="center")

    aux.set(title="Auxiliary loss", xlim=(0, 8.2), ylim=(1.6, -0.6), xticks=[0, 1, 2, 4, 6, 8])
    aux.set_yticks(range(2), LEVELS)
    aux.tick_params(axis="y", length=0)
    aux.grid(False, axis="y")
    scene["aux"] = [aux.barh(row, 0, height=0.7, **style.fill(meaning)) for row, meaning in enumerate(LEVELS.values())]
    aux.axvline(1, **style.line("reference"), linewidth=1.5)
    scene["values"] = [
        style.label(aux, 0, row, "", meaning, va="center_baseline") for row, meaning in enumerate(LEVELS.values())
    ]

    push.set(title="Push on the first sequence", xlabel="expert", xlim=(-0.6, MOST - 0.4), xticks=range(MOST))
    push.set_yscale("symlog", linthresh=SMALL, linscale=0.3)
    push.set(ylim=(-0.6, 0.6), yticks=[-0.1, -1e-3, 0, 1e-3, 0.1])
    push.set_yticklabels(["−0.1", "−0.001", "0", "0.001", "0.1"])
    push.minorticks_off()
    push.axhline(0, color=style.QUIET, linewidth=1)
    scene["arrows"] = []
    for meaning in LEVELS.values():
        look = style.look(meaning)
        (shaft,) = push.plot([], [], color=look.color, linewidth=2.2)
        heads = [
            push.plot([], [], color=look.color, marker=marker, linestyle="none", markersize=8)[0] for marker in "^v"
        ]
        if meaning == "norm":
            for head in heads:
                head.set_markerfacecolor("white")
        scene["arrows"].append([shaft, *heads])
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers = result.numbers
    count = len(numbers["load"])
    for name in ("load", "probability"):
        for expert, bar in enumerate(scene[name]):
            bar[0].set_visible(expert < count)
            bar[0].set_height(numbers[name][expert] if expert < count else 0)
    places = np.broadcast_to(np.arange(count) - 0.2, (SEQUENCES, count)) + np.linspace(-0.1, 0.1, SEQUENCES)[:, None]
    scene["dots"].set_data(places.ravel(), numbers["by_sequence"].ravel())
    scene["even"].set_data([-0.5, count - 0.5], [1 / count, 1 / count])
    for bar, label, value in zip(scene["aux"], scene["values"], numbers["aux"], strict=True):
        bar[0].set_width(value)
        label.set_text(f"{value:.2f}")
        label.set_x(value + 0.2 if value < 6.5 else value - 1.4)
    for (shaft, up, down), values, side in zip(scene["arrows"], numbers["push"], (-0.17, 0.17), strict=True):
        x = np.arange(count) + side
        shaft.set_data(np.repeat(x, 3), np.stack([0 * values, values, np.full(count, np.nan)], axis=1).ravel())
        for head, where in ((up, values > SMALL), (down, values < -SMALL)):
            head.set_data(x[where], values[where])


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with, named as in CONTROLS."""
    return Explorer(
        "router",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.4),
        start=start,
    )
