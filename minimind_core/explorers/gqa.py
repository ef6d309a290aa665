"""Explorer of notebook 04: which query heads share a K/V head, and what that saves in the cache."""

import math

from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from ..config import MiniMindConfig
from . import style
from .shell import Choice, Explorer, Result, Slider, powers

MOST = 16  # query heads
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNITS = ("KiB", "MiB", "GiB")
LENGTHS = powers(256, 131072)
WAYS = {"MHA": "before", "GQA": "after", "MQA": "reference"}  # name, meaning of its look


def _settings(config: MiniMindConfig) -> dict[str, int]:
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "layers": config.num_hidden_layers,
    }


MINIMIND_3 = _settings(MiniMindConfig.minimind_3())
CONTROLS = {
    "num_attention_heads": Slider("query heads", range(1, MOST + 1), MINIMIND_3["num_attention_heads"]),
    "num_key_value_heads": Slider("K/V heads", range(1, MOST + 1), MINIMIND_3["num_key_value_heads"]),
    "head_dim": Slider("head_dim", range(32, 257, 16), MINIMIND_3["head_dim"], snap=True),
    "layers": Slider("layers", range(1, 49), MINIMIND_3["layers"]),
    "seq": Slider("sequence length", LENGTHS, 4096, unit="tokens"),
    "dtype": Choice("dtype", tuple(BYTES), "bfloat16"),
}
PRESETS = {
    "MiniMind-3": MINIMIND_3,
    "MiniMind-2": _settings(MiniMindConfig.minimind_2()),
    "Qwen3-0.6B": {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "layers": 28},
    "MHA": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "MQA": {"num_attention_heads": 8, "num_key_value_heads": 1},
}
STILLS = {"mqa": PRESETS["MQA"]}


def compute(
    num_attention_heads: int, num_key_value_heads: int, head_dim: int, layers: int, seq: int, dtype: str
) -> Result:
    """Who shares whom, and the bytes of the cache with one K/V head per query head, with these, and with one for all.

    K/V heads must divide the query heads: the largest number that does, and is not above the wish, is taken.
    """
    heads = num_attention_heads
    kv_heads = next(n for n in range(min(num_key_value_heads, heads), 0, -1) if heads % n == 0)
    n_rep = heads // kv_heads
    token = [2 * layers * count * head_dim * BYTES[dtype] for count in (heads, kv_heads, 1)]  # 2: keys and values
    numbers = {
        "kv_of": [head // n_rep for head in range(heads)],
        "n_rep": n_rep,
        "seq": seq,
        "token": token,
        "cache": [seq * count for count in token],
    }
    wish = "" if kv_heads == num_key_value_heads else f" ({num_key_value_heads} does not divide {heads})"
    sharing = "each has its own" if n_rep == 1 else "all share it" if kv_heads == 1 else f"{n_rep} share each"
    saving = "as much as with MHA" if n_rep == 1 else f"{n_rep} times less than with MHA"
    sentence = (
        f"{several(heads, 'query head')}, {several(kv_heads, 'K/V head')}{wish}: {sharing}; query head h reads "
        f"K/V head h // {n_rep}. K and V of one token: 2 × {several(layers, 'layer')} × {several(kv_heads, 'head')} × "
        f"{head_dim} × {BYTES[dtype]} bytes = {token[1]:,} bytes; "
        f"of {seq:,} tokens: {size(seq * token[1])}, {saving}."
    )
    return Result(numbers, sentence)


def several(count: int, noun: str) -> str:
    """ "1 K/V head", "4 K/V heads"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def size(count: int) -> str:
    """Bytes in words: three digits and a binary unit."""
    power = min(int(math.log2(count)) // 10, 3)
    value = count / 1024**power
    digits = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{digits} {('bytes', *UNITS)[power]}"


def draw(figure: Figure) -> dict:
    heads, cache, bars = figure.subplot_mosaic(
        [["heads", "cache"], ["heads", "bars"]], width_ratios=[1, 1.35], height_ratios=[1.75, 1]
    ).values()
    heads.set(xlim=(-0.28, 1.28), ylim=(MOST + 1.5, -1.4), xticks=[], yticks=[], title="Who shares whom")
    heads.axis("off")
    heads.text(0, -0.75, "query head", ha="center", va="bottom")
    heads.text(1, -0.75, "K/V head", ha="center", va="bottom")
    number = {"ha": "center", "va": "center_baseline", "color": "white", "fontsize": 10, "fontweight": "bold"}
    scene = {
        "links": heads.add_collection(LineCollection([], linewidths=2)),
        "query": heads.scatter([], [], s=185, marker="o", zorder=3),
        "kv": heads.scatter([], [], s=200, marker="s", zorder=3),
        "query_names": [heads.text(0, 0, str(i), zorder=4, **number) for i in range(MOST)],
        "kv_names": [heads.text(1, 0, str(i), zorder=4, **number) for i in range(MOST)],
        "rule": heads.text(0.5, MOST + 1.1, "", ha="center", va="center"),
    }

    cache.set(title="Cache against sequence length", xscale="log", yscale="log", ylim=(2**14, 2**38))
    cache.set(xlim=(LENGTHS[0] / 1.2, LENGTHS[-1] * 1.2), xlabel="tokens")
    cache.set_xticks([2**9, 2**11, 2**13, 2**15, 2**17], ["512", "2k", "8k", "32k", "128k"])
    cache.set_yticks([2**power for power in range(15, 40, 5)], ["32 KiB", "1 MiB", "32 MiB", "1 GiB", "32 GiB"])
    cache.minorticks_off()
    scene["here"] = cache.plot([], [], color=style.QUIET, linewidth=1)[0]
    scene["lines"] = [cache.plot([], [], **style.line(meaning))[0] for meaning in WAYS.values()]
    scene["lines"][1].set(linewidth=6, alpha=0.5, zorder=1.5)  # wide and below: an equal line is seen on it
    scene["dots"] = [cache.plot([], [], **style.points(meaning), markersize=7)[0] for meaning in WAYS.values()]
    scene["most"] = style.label(cache, 2**8, 0, "MHA", WAYS["MHA"], va="bottom")
    scene["least"] = style.label(cache, 2**17, 0, "MQA", WAYS["MQA"], ha="right", va="top")

    bars.set(xlim=(0, 1.62), ylim=(2.5, -0.5), title="At the marked length", xlabel="share of MHA")
    bars.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "1/4", "1/2", "3/4", "1"])
    bars.set_yticks(range(3), ["MHA", "this", "MQA"])
    bars.tick_params(axis="y", length=0)
    bars.grid(False)
    scene["bars"] = [bars.barh(row, 1, height=0.6, **style.fill(WAYS[way])) for row, way in enumerate(WAYS)]
    scene["sizes"] = [bars.text(0, row, "", va="center") for row in range(3)]
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    kv_of, n_rep = n["kv_of"], n["n_rep"]
    rows = spread(len(kv_of))
    kv_rows = [sum(rows[i : i + n_rep]) / n_rep for i in range(0, len(rows), n_rep)]
    colors = [style.color(f"expert {kv % 8}") for kv in kv_of]
    scene["links"].set_segments([[(0, row), (1, kv_rows[kv])] for row, kv in zip(rows, kv_of, strict=True)])
    scene["links"].set_color(colors)
    for name, x, places, shades in (("query", 0, rows, colors), ("kv", 1, kv_rows, colors[::n_rep])):
        scene[name].set_offsets([(x, y) for y in places])
        scene[name].set_facecolor(shades)
        for i, text in enumerate(scene[f"{name}_names"]):
            text.set_visible(i < len(places))
            text.set_y(places[i] if i < len(places) else 0)
    scene["rule"].set_text(f"K/V head = query head // {n_rep}")

    for line, dot, token in zip(scene["lines"], scene["dots"], n["token"], strict=True):
        line.set_data(LENGTHS, [token * length for length in LENGTHS])
        dot.set_data([n["seq"]], [token * n["seq"]])
    scene["here"].set_data([n["seq"]] * 2, [2**14, 2**38])
    scene["most"].set_y(n["token"][0] * 2**8 * 2)
    scene["least"].set_y(n["token"][2] * 2**17 / 4)

    most = n["cache"][0]
    for (bar,), text, bytes_ in zip(scene["bars"], scene["sizes"], n["cache"], strict=True):
        bar.set_width(bytes_ / most)
        text.set_x(bytes_ / most + 0.03)
        text.set_text(size(bytes_) + (f", 1/{most // bytes_}" if most > bytes_ else ""))


def spread(count: int) -> list[float]:
    """Rows of `count` heads, in the middle of the MOST rows there are, at most 2 apart."""
    step = min(2.0, MOST / count)
    return [MOST / 2 + (i - (count - 1) / 2) * step for i in range(count)]


def explore(**start) -> Explorer:
    """See which query heads share a K/V head, and the bytes of the cache for MHA, this choice and MQA.

    start: controls to begin with, for example explore(num_key_value_heads=1).
    """
    return Explorer(
        "gqa",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.8),
        start=start,
    )
