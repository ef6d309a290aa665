"""Explorer of notebook 12: what a model of some sizes costs: parameters, bytes, FLOPs, cache."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..config import MiniMindConfig
from . import style
from .shell import Choice, Explorer, Result, Slider, powers

BYTES = {"float32": 4, "bfloat16": 2}
# what a design fixes: width inside, head_dim, QK-norm, shared experts
DESIGNS = ("MiniMind-3", "MiniMind-2", "Qwen3", "Llama 3.2")
PARTS = {  # and how each is drawn
    "embedding, head": "residual",
    "attention": "query",
    "scores": "value",
    "feed-forward": "gate",
    "router, norms": "norm",
}
ROWS = ("parameters", "for one token", "FLOPs of a token")
SHOWN = 0.085  # a share from here on has room for its number
LONGEST = 2**17

CONTROLS = {
    "design": Choice("design", DESIGNS, "MiniMind-3"),
    "layers": Slider("layers", range(1, 49), 8),
    "hidden": Slider("hidden size", range(64, 4097, 64), 768, snap=True),
    "heads": Slider("heads", powers(1, 32), 8, snap=True),
    "kv_heads": Slider("K/V heads", powers(1, 32), 4, snap=True),
    "vocab": Slider(
        "vocabulary", [256, 512, 1024, 2048, 4096, 6400, 8192, 16384, 32000, 50304, 65536, 128256, 151936, 262144], 6400
    ),
    "experts": Slider("experts", [1, 2, 3, 4, 6, 8, 16, 32, 64], 1, unit="in each layer; 1: dense"),
    "k": Slider("k", range(1, 9), 1, unit="experts for each token"),
    "length": Slider("length", powers(1, LONGEST), 2048, unit="tokens"),
    "dtype": Choice("dtype", tuple(BYTES), "float32"),
}
PRESETS = {
    "MiniMind-3": dict(design="MiniMind-3", layers=8, hidden=768, heads=8, kv_heads=4, vocab=6400, experts=1, k=1),
    "MiniMind-3 MoE": dict(design="MiniMind-3", layers=8, hidden=768, heads=8, kv_heads=4, vocab=6400, experts=4, k=1),
    "MiniMind-2 small": dict(
        design="MiniMind-2", layers=8, hidden=512, heads=8, kv_heads=2, vocab=6400, experts=1, k=1
    ),
    "MiniMind-2": dict(design="MiniMind-2", layers=16, hidden=768, heads=8, kv_heads=2, vocab=6400, experts=1, k=1),
    "MiniMind-2 MoE": dict(design="MiniMind-2", layers=8, hidden=640, heads=8, kv_heads=2, vocab=6400, experts=4, k=2),
    # hugging face: Qwen/Qwen3-0.6B and meta-llama/Llama-3.2-1B, config.json
    "Qwen3-0.6B": dict(design="Qwen3", layers=28, hidden=1024, heads=16, kv_heads=8, vocab=151936, experts=1, k=1),
    "Llama-3.2-1B": dict(
        design="Llama 3.2", layers=16, hidden=2048, heads=32, kv_heads=8, vocab=128256, experts=1, k=1
    ),
}
STILLS = {"moe": PRESETS["MiniMind-3 MoE"], "qwen3": PRESETS["Qwen3-0.6B"] | {"length": 32768}}


def config_of(
    design: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, experts: int, k: int
) -> MiniMindConfig:
    """The config of these controls, all of them with a tied embedding.

    More K/V heads than heads, or more chosen experts than there are, cannot be: as many as can be are taken.
    """
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": min(kv_heads, heads),
        "vocab_size": vocab,
        "use_moe": experts > 1,
        "num_experts": experts,
        "num_experts_per_tok": min(k, experts),
    }
    if design == "MiniMind-2":
        return MiniMindConfig.minimind_2(**sizes)
    if design == "Qwen3":
        return MiniMindConfig(**sizes, head_dim=128, intermediate_size=3 * hidden)
    if design == "Llama 3.2":
        return MiniMindConfig(**sizes, qk_norm=False, intermediate_size=4 * hidden)
    return MiniMindConfig(**sizes)


def budget(config: MiniMindConfig, length: int) -> dict[str, dict[str, int]]:
    """For each of ROWS the numbers of each of PARTS, from formulas.

    FLOPs: of one new token that looks at `length` tokens, itself among them; a multiplication and an addition are two.
    Matrices only: looking up the embedding, norms and the activation are not counted.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    embedding = config.vocab_size * hidden
    attention = 2 * hidden * query + 2 * hidden * key
    router = config.num_experts * hidden if config.use_moe else 0
    norms = layers * (2 * hidden + 2 * config.head_dim * config.qk_norm) + hidden
    one, run, there = 3 * hidden * config.intermediate_size, 1, 1
    if config.use_moe:
        one = 3 * hidden * config.moe_intermediate_size
        run = config.num_experts_per_tok + config.n_shared_experts
        there = config.num_experts + config.n_shared_experts
    rows = {
        "parameters": (embedding, layers * attention, 0, layers * there * one, layers * router + norms),
        "for one token": (embedding, layers * attention, 0, layers * run * one, layers * router + norms),
        "FLOPs of a token": (
            2 * embedding,
            2 * layers * attention,
            4 * layers * query * length,
            2 * layers * run * one,
            2 * layers * router,
        ),
    }
    return {row: dict(zip(PARTS, values, strict=True)) for row, values in rows.items()}


def compute(
    design: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    experts: int,
    k: int,
    length: int,
    dtype: str,
) -> Result:
    """Parameters, all and of one token, and its FLOPs, by part; bytes of the weights and of the cache."""
    config = config_of(design, layers, hidden, heads, kv_heads, vocab, experts, k)
    rows = budget(config, length)
    total, active, flops = (sum(row.values()) for row in rows.values())
    weights = total * BYTES[dtype]
    each = 2 * layers * config.num_key_value_heads * config.head_dim * BYTES[dtype]
    used = "all of them for every token" if active == total else f"{active:,} for one token"
    words = (
        f"{total:,} parameters, {used}; {size(weights)} in {dtype}. Width inside {config.intermediate_size:,}, "
        f"head_dim {config.head_dim}. A token that looks at {length:,}: {short(flops)} FLOPs, "
        f"{rows['FLOPs of a token']['scores'] / flops:.0%} for scores. K/V cache: {size(each)} a token, "
        f"{size(each * length)}."
    )
    if kv_heads > heads:
        words += f" K/V heads: {heads} used, not {kv_heads}: no more than heads."
    if k > experts:
        words += f" k: {experts} used, not {k}: no more than experts."
    numbers = {
        "parts": np.array([list(row.values()) for row in rows.values()], dtype=float),
        "sums": np.array([total, active, flops], dtype=float),
        "weights": weights,
        "each": each,
        "length": length,
    }
    return Result(numbers, words)


def short(count: float, units: tuple[str, ...] = ("", "k", "M", "B", "T")) -> str:
    """A number in three digits and a unit: 63.9M, 1.24B."""
    digits = float(f"{count:.3g}")
    power = max(i for i in range(len(units)) if digits >= 1000**i or not i)
    return f"{float(f'{count / 1000**power:.3g}'):g}{units[power]}"


def size(count: float) -> str:
    """Bytes, in the same way: 256 MB."""
    return short(count, (" bytes", " kB", " MB", " GB", " TB"))


def draw(figure: Figure) -> dict:
    """Above, what each part costs, in shares; below, weights and cache over the length of the text."""
    bars, memory = figure.subplots(2, 1, height_ratios=(1, 1.15))
    handles = [Patch(label=part, **style.fill(look)) for part, look in PARTS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, columnspacing=1.2, handlelength=1.4)
    scene = {}

    bars.set(xlim=(0, 1.13), ylim=(2.55, -0.55), title="Parts, and their shares")
    bars.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    bars.set_yticks(range(3), ROWS)
    bars.tick_params(axis="y", length=0)
    bars.grid(False, axis="y")
    scene["bars"] = [
        [bars.barh(row, 0, height=0.66, **style.fill(look)) for look in PARTS.values()] for row in range(3)
    ]
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
    options = {"va": "center_baseline", "ha": "center"}
    scene["shares"] = [[bars.text(0, row, "", bbox=ground, **options) for _ in PARTS] for row in range(3)]
    scene["sums"] = [bars.text(1.12, row, "", va="center_baseline", ha="right", fontweight="bold") for row in range(3)]

    memory.set(xscale="log", yscale="log", xlim=(0.7, 4 * LONGEST), ylim=(1, 1e14), title="Bytes, as the text grows")
    memory.set(xlabel="tokens in the text")
    memory.set_xticks([1, 10, 100, 1e3, 1e4, 1e5], ["1", "10", "100", "1,000", "10,000", "100,000"])
    memory.set_yticks([1e3, 1e6, 1e9, 1e12], ["1 kB", "1 MB", "1 GB", "1 TB"])
    memory.minorticks_off()
    (scene["weights"],) = memory.plot([], [], **style.line("residual"))
    (scene["cache"],) = memory.plot([], [], **style.line("key"))
    (scene["here"],) = memory.plot([], [], **style.points("highlight"), markersize=12)
    scene["weights_label"] = style.label(memory, 0.85, 1, "", "residual", va="bottom")
    scene["cache_label"] = style.label(memory, 1, 1, "", "key", va="top")
    return scene


def update(scene: dict, result: Result) -> None:
    """Set all that `draw` returned."""
    n = result.numbers
    wholes = n["sums"][[0, 0, 2]]  # what one token needs is a part of all parameters
    for bars, shares, parts in zip(scene["bars"], scene["shares"], n["parts"] / wholes[:, None], strict=True):
        left = 0.0
        for (bar,), text, share in zip(bars, shares, parts, strict=True):
            bar.set_x(left)
            bar.set_width(share)
            bar.set_visible(share > 0)
            text.set_x(left + share / 2)
            text.set_text(f"{share:.0%}" if share >= SHOWN else "")
            left += share
    for text, count in zip(scene["sums"], n["sums"], strict=True):
        text.set_text(short(count))
    scene["weights"].set_data([0.7, LONGEST], [n["weights"]] * 2)
    scene["cache"].set_data([1, LONGEST], [n["each"], n["each"] * LONGEST])
    scene["here"].set_data([n["length"]], [n["each"] * n["length"]])
    scene["weights_label"].set_y(n["weights"] * 2)
    scene["weights_label"].set_text(f"weights {size(n['weights'])}")
    kept, label = n["each"] * n["length"], scene["cache_label"]
    if n["length"] <= 4096:  # to the right of the star, below the line
        label.set(ha="left", va="top", position=(n["length"] * 1.25, kept * 0.4))
    elif kept > n["weights"]:  # to the left, on the side where the weights' line is not
        label.set(ha="right", va="bottom", position=(n["length"] * 0.8, kept * 2))
    else:
        label.set(ha="right", va="top", position=(n["length"] * 1.5, kept * 0.03))
    label.set_text(f"K/V cache {size(kept)}")


def explore(**start) -> Explorer:
    """Change the sizes of a model and see what it costs: parameters, bytes, FLOPs of one token, K/V cache.

    Every embedding is tied. start: controls to begin with, for example explore(layers=16).
    """
    return Explorer(
        "budget",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.6),
        start=start,
    )
