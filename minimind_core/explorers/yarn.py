"""Explorer of notebook 03: the ramp visualizer, YaRN beside the other ways to stretch a rotary embedding."""

import math

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ..rope import rope_frequencies, yarn_attention_factor, yarn_frequencies, yarn_pair_index, yarn_ramp, yarn_range
from . import style
from .shell import Explorer, Result, Slider, linear, log, powers

CONTROLS = {
    "factor": Slider("factor", powers(1, 64), 16),
    "original_length": Slider("original length", powers(128, 131072), 2048, unit="tokens"),
    "beta_fast": Slider("beta_fast", [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], 32.0, unit="turns"),
    "beta_slow": Slider("beta_slow", [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], 1.0, unit="turns"),
    "base": Slider("base", log(1e3, 1e7, 4), 1e6),
    "head_dim": Slider("head_dim", range(16, 257, 8), 96, snap=True),
    "attention_factor": Slider("attention factor", linear(1, 1.5, 0.02), 1.0),
}
MINIMIND_3 = {
    "factor": 16,
    "original_length": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "base": 1e6,
    "head_dim": 96,
    "attention_factor": 1.0,
}
PRESETS = {
    "MiniMind-3": MINIMIND_3,
    "Qwen3": MINIMIND_3 | {"factor": 4, "original_length": 32768, "head_dim": 128, "attention_factor": 1.1386},
    "Llama-3 style": MINIMIND_3
    | {"factor": 8, "original_length": 8192, "beta_fast": 4.0, "base": 5e5, "head_dim": 128},
    "YaRN paper": MINIMIND_3 | {"original_length": 4096, "base": 1e4, "head_dim": 128, "attention_factor": 1.2773},
    "reversed": MINIMIND_3 | {"beta_fast": 1.0, "beta_slow": 32.0},
}
STILLS = {"qwen3": PRESETS["Qwen3"], "llama_3": PRESETS["Llama-3 style"]}
# the ways to stretch, and how each is drawn; PI is position interpolation, NTK is NTK-aware scaling
METHODS = {"unscaled": "before", "PI": "reference", "NTK": "norm", "YaRN": "after", "Llama-3": "value"}
SCORES = (0.9, 2.4)  # limits of the score axis: attention factors from 1 to 1.5, squared


def interpolated_frequencies(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """Position interpolation: every pair is slowed by `factor`, as if positions were divided by it.

    frequencies: [pairs], radians per position. Source: Chen et al. 2023, "Extending Context Window of Large Language
    Models via Positional Interpolation".
    """
    return frequencies / factor


def ntk_aware_frequencies(dim: int, rope_base: float, factor: float) -> torch.Tensor:
    """Frequencies [pairs] for the base rope_base * factor^(dim / (dim - 2)): pair 0 is kept, the last one divided.

    dim: head_dim. Source: Peng et al. 2023, "YaRN", equations 15 and 16.
    """
    return rope_frequencies(dim, rope_base * factor ** (dim / (dim - 2)))


def llama3_ramp(
    frequencies: torch.Tensor, original_length: float, low_freq_factor: float, high_freq_factor: float
) -> torch.Tensor:
    """0 for pairs that turn high_freq_factor times or more within original_length, 1 for low_freq_factor or fewer.

    Linear in the turns between: frequencies [pairs], radians per position -> [pairs]. Raises ValueError unless
    high_freq_factor is above low_freq_factor.
    Source: Llama 3.1's reference code, apply_scaling; the same ramp is Peng et al. 2023, "YaRN", equation 18.
    """
    if not high_freq_factor > low_freq_factor:
        raise ValueError(
            f"high_freq_factor {high_freq_factor:g} must be above low_freq_factor {low_freq_factor:g}: "
            f"both count turns within the original window, and fast pairs turn more often"
        )
    turns = original_length * frequencies / math.tau
    return ((high_freq_factor - turns) / (high_freq_factor - low_freq_factor)).clamp(0, 1)


def llama3_frequencies(
    frequencies: torch.Tensor, factor: float, original_length: float, low_freq_factor: float, high_freq_factor: float
) -> torch.Tensor:
    """Frequencies [pairs] after Llama 3.1's scaling: old * (1 - ramp + ramp / factor), with its own ramp.

    Llama 3.1 itself: factor 8, original_length 8192, low_freq_factor 1, high_freq_factor 4, base 5e5, no attention
    factor.
    """
    ramp = llama3_ramp(frequencies, original_length, low_freq_factor, high_freq_factor)
    return frequencies * (1 - ramp + ramp / factor)


def unseen_pairs(before: torch.Tensor, after: torch.Tensor, original_length: float, factor: float) -> torch.Tensor:
    """Which pairs meet angles in the window of factor * original_length that they never met in training. Bool [pairs].

    A pair that made a full turn within original_length has met them all. A slower one has met the angles up to
    original_length * before, and the stretched window asks for angles up to factor * original_length * after.
    """
    partial = original_length * before < math.tau
    return partial & (factor * after > before * (1 + 1e-5))  # the margin is for rounding


def compute(
    factor: float,
    original_length: float,
    beta_fast: float,
    beta_slow: float,
    base: float,
    head_dim: int,
    attention_factor: float,
) -> Result:
    """Every method's frequencies. A method that refuses the settings has empty arrays, and the sentence says so."""
    pairs, window = head_dim // 2, factor * original_length
    before = rope_frequencies(head_dim, base)
    methods = {
        "unscaled": before,
        "PI": interpolated_frequencies(before, factor),
        "NTK": ntk_aware_frequencies(head_dim, base, factor),
    }
    crossings = [yarn_pair_index(turns, head_dim, base, original_length) for turns in (beta_fast, beta_slow)]
    low, high, ramp, ramp_llama3 = -1, -1, torch.empty(0), torch.empty(0)
    try:
        low, high = yarn_range(head_dim, base, original_length, beta_fast, beta_slow)
    except ValueError as error:  # the core refuses a reversed range and says with which numbers
        said = f"Refused: {str(error).partition(';')[0]}. "
    else:
        ramp = yarn_ramp(low, high, pairs)
        scaling = {"factor": factor, "original_max_position_embeddings": original_length}
        methods["YaRN"] = yarn_frequencies(before, base, scaling | {"beta_fast": beta_fast, "beta_slow": beta_slow})
        kept, stretched = (ramp == 0).sum().item(), (ramp == 1).sum().item()
        blended = pairs - kept - stretched
        said = f"low {low}, high {high}: of {pairs} pairs {kept} kept, {blended} blended, {stretched} stretched. "
    if beta_fast > beta_slow:
        ramp_llama3 = llama3_ramp(before, original_length, beta_slow, beta_fast)
        methods["Llama-3"] = llama3_frequencies(before, factor, original_length, beta_slow, beta_fast)
    elif "YaRN" in methods:
        said += "Llama-3's formula needs beta_fast > beta_slow. "

    unseen = {
        name: unseen_pairs(before, after, original_length, factor).sum().item() for name, after in methods.items()
    }
    with_yarn = f", with YaRN {unseen['YaRN']}" if "YaRN" in unseen else ""
    paper = yarn_attention_factor(factor)
    said += (
        f"Up to position {window}, {unseen['unscaled']} of {pairs} pairs ({unseen['unscaled'] / pairs:.0%}) meet "
        f"unseen angles{with_yarn}. Scores x {attention_factor**2:.2f}; the paper's {paper:.3f} gives x {paper**2:.2f}."
    )
    numbers = {
        "pairs": pairs,
        "factor": factor,
        "original": original_length,
        "window": window,
        "low": low,
        "high": high,
        "ramp YaRN": ramp.numpy(),
        "ramp Llama-3": ramp_llama3.numpy(),
        "turns": np.array([beta_fast, beta_slow]),
        "crossings": np.array(crossings),
        "scores": attention_factor**2,
        "scores_paper": paper**2,
    }
    for name in METHODS:
        after = methods.get(name, torch.empty(0)).double()
        numbers[f"frequency {name}"] = after.numpy()
        numbers[f"ratio {name}"] = (after / before[: len(after)]).numpy()
        numbers[f"unseen {name}"] = unseen.get(name, -1)
    return Result(numbers, said)


def draw(figure: Figure) -> dict:
    figure.get_layout_engine().set(w_pad=0.08)  # inches; room for wider tick labels than those of the first state
    grid = figure.add_gridspec(3, 2, height_ratios=[4, 3, 1])
    ramp, ratio = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    wave, share = figure.add_subplot(grid[1:, 0]), figure.add_subplot(grid[1, 1])
    score = figure.add_subplot(grid[2, 1])
    figure.legend(
        [Line2D([], [], **style.line(look)) for look in METHODS.values()],
        ["unscaled", "PI: interpolation", "NTK-aware", "YaRN", "Llama-3"],
        loc="outside upper center",
        ncols=len(METHODS),
        handlelength=2.2,
        columnspacing=1.4,
    )

    ramp.set(ylim=(-0.08, 1.35), yticks=(0, 0.5, 1), title="Ramp: 0 keep, 1 divide", xlabel="pair")
    ratio.set(ylim=(1 / 90, 1.6), yscale="log", title="New frequency / old", xlabel="pair")
    ratio.set_yticks([1, 1 / 4, 1 / 16, 1 / 64], labels=["1", "1/4", "1/16", "1/64"])
    ratio.minorticks_off()
    wave.set(yscale="log", title="Wavelength (right: frequency)", xlabel="pair")
    frequency = wave.twinx()
    frequency.set(yscale="log")
    frequency.grid(False)
    frequency.spines["right"].set_visible(True)
    bars = [name for name in METHODS if name != "Llama-3"]
    share.set(xlim=(0, 1.35), ylim=(len(bars) - 0.4, -0.6), title="Pairs that meet unseen angles")
    share.set_yticks(range(len(bars)), labels=bars)
    share.tick_params(axis="y", length=0)
    share.grid(axis="y", visible=False)
    share.set_xticks([0, 0.5, 1], labels=["0", "half", "all"])
    score.set(xlim=SCORES, ylim=(-1, 1), yticks=(), xlabel="scores are multiplied by", xticks=(1, 1.5, 2))
    score.spines["left"].set_visible(False)

    scene = {
        "blend": ramp.add_patch(Rectangle((0, -1), 0, 3, facecolor=style.HIGHLIGHT_FILL, edgecolor="none")),
        "low": ramp.plot([], [], color=style.INK, linewidth=1)[0],
        "high": ramp.plot([], [], color=style.INK, linewidth=1)[0],
        "ramp Llama-3": ramp.plot([], [], **style.line(METHODS["Llama-3"]))[0],
        "ramp YaRN": ramp.plot([], [], **style.line("after"), marker=".")[0],
        "low text": style.label(ramp, 0, 1.21, "", "residual", ha="right"),
        "high text": style.label(ramp, 0, 0.12, "", "residual"),
        "refused": style.label(ramp, 0.03, 0.5, "", "wrong", transform=ramp.transAxes),
        "original": wave.plot([], [], color=style.color("highlight"), linewidth=1.2)[0],
        "window": wave.plot([], [], color=style.color("highlight"), linewidth=1.2, linestyle="--")[0],
        "window text": style.label(wave, 0.03, 0.97, "", "highlight", va="top", transform=wave.transAxes),
        "wave unscaled": wave.plot([], [], **style.line("before"))[0],
        "wave YaRN": wave.plot([], [], **style.line("after"))[0],
        "crossings": wave.plot([], [], **style.points("residual"))[0],
        "bars": share.barh(range(len(bars)), [0] * len(bars), height=0.6),
        "counts": [share.text(0, i, "", va="center", fontweight="bold") for i in range(len(bars))],
        "scores": score.plot([], [], **style.points("after"), markersize=10)[0],
        "scores paper": score.plot([], [], "|", color=style.INK, markersize=14, markeredgewidth=2)[0],
        "scores text": score.text(0, 0.9, "paper", ha="center", va="bottom", fontweight="bold"),
        "ramp axes": ramp,
        "ratio axes": ratio,
        "wave axes": wave,
        "frequency axes": frequency,
    }
    for bar, text, name in zip(scene["bars"], scene["counts"], bars, strict=True):
        bar.set(**style.fill(METHODS[name]))
        text.set_color(style.color(METHODS[name]))
    for name, look in METHODS.items():
        if name != "unscaled":
            scene[f"ratio {name}"] = ratio.plot([], [], **style.line(look))[0]
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    pairs, end, refused = n["pairs"], n["pairs"] - 0.5, n["low"] < 0
    index = np.arange(pairs)
    longest = max(math.tau / n["frequency unscaled"][-1] * n["factor"], n["window"])
    for axes in (scene["ramp axes"], scene["ratio axes"], scene["wave axes"]):
        style.limits(axes, x=(-0.5, end))
    bottom, top = 2.0, 10.0 ** math.ceil(math.log10(2 * longest))
    style.limits(scene["wave axes"], y=(bottom, top))
    style.limits(scene["frequency axes"], y=(math.tau / bottom, math.tau / top))

    for mark in ("low", "high"):
        scene[mark].set_data([] if refused else [n[mark]] * 2, [] if refused else [-1, 2])
        scene[f"{mark} text"].set_text("" if refused else f"{mark} {n[mark]}")
    scene["blend"].set(x=n["low"], width=n["high"] - n["low"])
    for mark, share in (("low", 0.3), ("high", 0.65)):  # to the right of its line where there is room
        x, left = min(n[mark], end), n[mark] > share * pairs
        scene[f"{mark} text"].set(x=x + (-0.015 if left else 0.015) * pairs, ha="right" if left else "left")
    scene["refused"].set_text("YaRN refused:\nreversed range" if refused else "")
    for name in ("ramp YaRN", "ramp Llama-3"):
        scene[name].set_data(index[: len(n[name])], n[name])

    for name in METHODS:
        ratio = n[f"ratio {name}"]
        if name != "unscaled":
            scene[f"ratio {name}"].set_data(index[: len(ratio)], ratio)
    for name in ("unscaled", "YaRN"):
        frequency = n[f"frequency {name}"]
        scene[f"wave {name}"].set_data(index[: len(frequency)], math.tau / frequency)
    scene["crossings"].set_data(n["crossings"], n["original"] / n["turns"])
    for mark in ("original", "window"):
        scene[mark].set_data([-0.5, end], [n[mark]] * 2)
    scene["window text"].set_text(f"solid: trained {n['original']}\ndashed: stretched {n['window']}")

    for bar, text, name in zip(scene["bars"], scene["counts"], METHODS, strict=False):
        count = n[f"unseen {name}"]
        bar.set_width(max(count, 0) / pairs)
        text.set_text("refused" if count < 0 else f"{count} of {pairs}")
        text.set_x(max(count, 0) / pairs + 0.02)
    scene["scores"].set_data([n["scores"]], [0])
    scene["scores paper"].set_data([n["scores_paper"]], [0])
    scene["scores text"].set_x(n["scores_paper"])


def explore(**start) -> Explorer:
    """See which pairs YaRN keeps, blends and stretches, beside position interpolation, NTK-aware and Llama-3.

    start: controls to begin with, for example explore(factor=4). The Llama-3 curve takes beta_slow and beta_fast as
    its low_freq_factor and high_freq_factor.
    """
    return Explorer(
        "yarn",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.8),
        start=start,
    )
