"""Explorer of notebook 00: the shape walk. One stage of the forward pass, its shape as a box, bytes, parameters."""

import math
from functools import lru_cache

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from ..config import MiniMindConfig
from ..model import MiniMindForCausalLM, count_parameters
from . import style
from .shell import Choice, Explorer, Result, Slider, powers

MODELS = {
    "MiniMind-3": MiniMindConfig.minimind_3(),
    "MiniMind-3 MoE": MiniMindConfig.minimind_3_moe(),
    "MiniMind-2 small": MiniMindConfig.minimind_2_small(),
    "MiniMind-2": MiniMindConfig.minimind_2(),
    "MiniMind-2 MoE": MiniMindConfig.minimind_2_moe(),
}
BYTES = {"float32": 4, "bfloat16": 2}
# name, axes, look, and what the numbers are; {} is filled with "4 texts of 340 tokens"
STAGES = (
    ("ids", "batch seq", "before", "token numbers, {}"),
    ("embedding", "batch seq hidden", "residual", "{}, each token now a vector"),
    ("norm", "batch seq hidden", "norm", "a copy of the stream, brought to size, for attention to read"),
    ("q", "batch seq heads head_dim", "query", "what each token looks for, head by head"),
    ("k, v (each)", "batch seq kv_heads head_dim", "key", "what each token offers, with fewer heads than q"),
    ("attention weights", "batch heads query key", "value", "how much each query looks at each key"),
    ("+ attention", "batch seq hidden", "residual", "the stream again, attention's result added"),
    ("norm ", "batch seq hidden", "norm", "a second copy, brought to size, for the feed-forward to read"),
    ("gate, up (each)", "batch seq intermediate", "gate", "the wide middle of the feed-forward"),
    ("+ feed-forward", "batch seq hidden", "residual", "the stream again: the block is done"),
    ("final norm", "batch seq hidden", "norm", "the stream after all blocks, brought to size"),
    ("logits", "batch seq vocab", "up", "one score for each token of the vocabulary, at every position"),
    ("loss", "", "highlight", "a single number"),
)
BLOCK = (2, 9)  # the stages that every block runs through
SAME = (2, 6, 7, 9, 10)  # the stages whose shape is the embedding's
COLUMN = 5e19  # where the column of shapes ends, on the logarithmic axis of bytes
GROUPS = {"embedding": "residual", "attention": "query", "feed-forward": "gate"}
CONTROLS = {
    "stage": Slider("stage", range(len(STAGES)), 1),
    "batch": Slider("batch", powers(1, 16), 4, unit="texts"),
    "seq": Slider("seq", sorted([*powers(1, 4096), 340]), 340, unit="tokens"),
    "model": Choice("model", tuple(MODELS), "MiniMind-3"),
    "dtype": Choice("dtype", tuple(BYTES), "float32"),
}
PRESETS = {
    "a training batch": {"batch": 4, "seq": 340},
    "a long prompt": {"batch": 1, "seq": 4096, "stage": 5},
    "one new token": {"batch": 1, "seq": 1},
    "the head": {"stage": 11},
}
STILLS = {"long_prompt": {"batch": 1, "seq": 4096, "stage": 5}}


@lru_cache
def parameters(model: str) -> dict[str, tuple[int, int]]:
    """(total, active) parameters of each group and of the whole model, counted on a model that holds no numbers.

    The norms on the stream are in no group: 13,056 parameters are too few to be drawn.
    """
    with torch.device("meta"):
        built = MiniMindForCausalLM(MODELS[model].replace(max_position_embeddings=1))
    total, active = count_parameters(built)
    place = {"embedding": "embed_tokens", "attention": "self_attn", "feed-forward": "mlp"}
    sizes = {
        group: sum(parameter.numel() for name, parameter in built.named_parameters() if place[group] in name)
        for group in GROUPS
    }
    counts = {group: (size, size - (total - active) * (group == "feed-forward")) for group, size in sizes.items()}
    return counts | {"all": (total, active)}


def shape_of(stage: int, model: str, batch: int, seq: int) -> dict[str, int]:
    """The axes of a stage and their sizes, in order. A token that visits several experts has an axis `visits`."""
    config = MODELS[model]
    visits = config.num_experts_per_tok + config.n_shared_experts
    sizes = {
        "batch": batch,
        "seq": seq,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "query": seq,
        "key": seq,
        "intermediate": config.moe_intermediate_size if config.use_moe else config.intermediate_size,
        "vocab": config.vocab_size,
        "visits": visits,
    }
    axes = STAGES[stage][1]
    if config.use_moe and visits > 1:
        axes = axes.replace("intermediate", "visits intermediate")
    return {axis: sizes[axis] for axis in axes.split()}


def compute(stage: int, batch: int, seq: int, model: str, dtype: str) -> Result:
    """Shape, values and bytes of every stage for this batch, and the parameters of the model."""
    shapes = [list(shape_of(i, model, batch, seq).values()) for i in range(len(STAGES))]
    values = [math.prod(shape) for shape in shapes]
    wide = {"ids": 8, "loss": 4}  # int64; and a loss is always float32
    bytes_ = [value * wide.get(STAGES[i][0], BYTES[dtype]) for i, value in enumerate(values)]
    total, active = parameters(model)["all"]
    name, _, _, what = STAGES[stage]
    numbers = {
        "stage": stage,
        "bytes": bytes_,
        "values": values,
        "sizes": shapes[stage],
        "layers": MODELS[model].num_hidden_layers,
        "total": [parameters(model)[group][0] for group in GROUPS],
        "active": [parameters(model)[group][1] for group in GROUPS],
        "all": [total, active],
        "batch": batch,
        "seq": seq,
        "model": list(MODELS).index(model),
    }
    what = what.format(f"{several(batch, 'text')} of {several(seq, 'token')}")
    used = "all of them at work for each token" if active == total else f"{active / 1e6:.1f}M at work for one token"
    sentence = (
        f"Stage {stage}, {name.strip()}: {what}. {words(shape_of(stage, model, batch, seq))}: "
        f"{several(values[stage], 'value')}, {size(bytes_[stage])}. {model} has {total / 1e6:.1f}M parameters, {used}."
    )
    return Result(numbers, sentence)


def several(count: int, noun: str) -> str:
    """ "1 text", "4 texts"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def words(shape: dict[str, int]) -> str:
    """A shape with the names of its axes: "batch 4, seq 340, hidden 768"."""
    return ", ".join(f"{axis} {count}" for axis, count in shape.items()).capitalize() or "No axes"


def size(count: int) -> str:
    """Bytes in words: three digits and a unit."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{float(f'{count / 10**power:.3g}'):g} {unit}"
    return f"{count} bytes"


def draw(figure: Figure) -> dict:
    axes, box, counts = figure.subplot_mosaic(
        [["walk", "box"], ["walk", "counts"]], width_ratios=[1.62, 1], height_ratios=[1.9, 1]
    ).values()
    last = len(STAGES) - 1
    axes.set(xlim=(1, 1e22), ylim=(last + 0.6, -0.6), xscale="log", title="The walk: bytes at each stage")
    axes.set_xticks([1, 1e3, 1e6, 1e9], ["1 B", "1 kB", "1 MB", "1 GB"])
    axes.minorticks_off()
    axes.grid(False, axis="y")
    axes.set_yticks(range(last + 1), [name for name, *_ in STAGES])
    axes.tick_params(axis="y", length=0)
    first, end = BLOCK
    axes.plot([COLUMN * 8] * 2, [first - 0.4, end + 0.4], color=style.QUIET, linewidth=2)
    for i in SAME:
        axes.text(COLUMN, i, "same shape", va="center", ha="right", color=style.QUIET)
    axes.text(COLUMN, last, "one number", va="center", ha="right")
    scene = {
        "row": axes.add_patch(
            Rectangle((1, 0), COLUMN * 4, 1, fill=False, color=style.color("highlight"), linewidth=2)
        ),
        "bars": [axes.barh(i, 1, left=1, height=0.62, **style.fill(look)) for i, (_, _, look, _) in enumerate(STAGES)],
        "shapes": {i: axes.text(COLUMN, i, "", va="center", ha="right") for i in range(last) if i not in SAME},
        "layers": axes.text(COLUMN * 20, (first + end) / 2, "", rotation=90, va="center", color=style.QUIET),
    }

    box.set(xlim=(-0.36, 1.5), ylim=(-0.3, 1.42), xticks=[], yticks=[], title="Its shape, log scale")
    box.axis("off")
    scene["faces"] = [
        box.add_patch(Polygon([(0, 0)] * 4, **style.fill("residual", alpha))) for alpha in (0.1, 0.2, 0.3)
    ]
    scene["across"] = box.text(0, -0.05, "", va="top", ha="left")
    scene["down"] = box.text(-0.04, 0, "", va="bottom", ha="right", rotation=90)
    scene["back"] = box.text(0, 0, "", va="bottom", ha="left")
    scene["copies"] = box.text(-0.3, 1.38, "", va="top", ha="left")

    counts.set(xlim=(0, 285), ylim=(1.5, -0.5), title="Parameters, millions")
    counts.set_yticks([0, 1], ["total", "active"])
    counts.tick_params(axis="y", length=0)
    counts.grid(False, axis="y")
    handles = [Patch(label=group, **style.fill(look)) for group, look in GROUPS.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, columnspacing=1.2, handlelength=1.4)
    scene["parts"] = [
        [counts.barh(row, 1, height=0.55, **style.fill(look)) for look in GROUPS.values()] for row in (0, 1)
    ]
    scene["sums"] = [counts.text(0, row, "", va="center") for row in (0, 1)]
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    model, stage = list(MODELS)[n["model"]], n["stage"]
    scene["row"].set_y(stage - 0.5)
    for i, count in enumerate(n["bytes"]):
        (bar,) = scene["bars"][i]
        bar.set_width(count - 1)
    for i, text in scene["shapes"].items():
        text.set_text(str(list(shape_of(i, model, n["batch"], n["seq"]).values())))
    scene["layers"].set_text(f"{n['layers']} blocks")
    place_box(scene, list(shape_of(stage, model, 1, 1)), n["sizes"], STAGES[stage][2])
    for row, (key, total) in enumerate(zip(("total", "active"), n["all"], strict=True)):
        left = 0.0
        for (bar,), count in zip(scene["parts"][row], n[key], strict=True):
            bar.set_x(left)
            bar.set_width(count / 1e6)
            left += count / 1e6
        scene["sums"][row].set_position((left + 6, row))
        scene["sums"][row].set_text(f"{total / 1e6:.1f}M")


def place_box(scene: dict, axes: list[str], sizes: list[int], look: str) -> None:
    """The last axis lies across, the one before it runs down, the one before that goes back; more axes are copies.

    Sides grow with the logarithm: each doubling adds the same length.
    """
    long = [0.07 + 0.075 * math.log2(count) for count in sizes]
    wide, high, deep = ([0.0, 0.0, *long[-3:]][::-1] + [0.0] * 3)[:3]
    if len(sizes) < 2:
        high = 0.07 if sizes else 0.1
        wide = wide or 0.1
    deep *= 0.42
    front = [(0, 0), (wide, 0), (wide, high), (0, high)]
    top = [(0, high), (deep, high + deep), (wide + deep, high + deep), (wide, high)]
    side = [(wide, 0), (wide + deep, deep), (wide + deep, high + deep), (wide, high)]
    for face, corners, alpha in zip(scene["faces"], (front, top, side), (0.12, 0.25, 0.4), strict=True):
        face.set_xy(corners)
        face.set(**{key: value for key, value in style.fill(look, alpha).items() if key != "hatch"})
    names = [f"{axis} {count:,}" for axis, count in zip(axes, sizes, strict=True)]
    across, down, back = ([*names[-3:]][::-1] + [""] * 3)[:3]
    scene["across"].set_text(across or "no axes")
    scene["down"].set_text(down)
    scene["back"].set_position((deep + 0.03, high + deep + 0.03))
    scene["back"].set_text(back)
    scene["copies"].set_text(f"{names[0]}: so many boxes" if len(names) > 3 else "")


def explore(**start) -> Explorer:
    """Walk through the forward pass: the shape, values and bytes at each stage, for a batch and a model of your choice.

    Attention weights are shown as the explicit path makes them; the fast path never stores them.
    start: controls to begin with, for example explore(stage=5, seq=4096).
    """
    return Explorer(
        "start_here",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.6),
        start=start,
    )
