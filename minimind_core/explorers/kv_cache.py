"""Explorer of notebook 05: writing with a cache, pass by pass: what is computed, what is read, what is kept."""

import numpy as np
from matplotlib import colors
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ..attention import causal_mask
from ..config import MiniMindConfig
from . import style
from .shell import Explorer, Result, Slider, Toggle, powers

CONFIG = MiniMindConfig()
LAYERS, HEAD_DIM = CONFIG.num_hidden_layers, CONFIG.head_dim
PROMPT, PASSES = 12, 13  # the longest prompt, and the last pass
TOKENS = PROMPT + PASSES - 1
# what a cell of the table, or a place of a strip, can be; its look, its marker and its words in the legend
KINDS = {
    "new": ("query", "o", "computed now"),
    "cached": ("key", "s", "from the cache"),
    "past": ("before", ".", "done before"),
    "again": ("wrong", "x", "done again"),
    "masked": ("before", "_", "masked"),
}
EMPTY = len(KINDS)  # the number of a cell where nothing is
COLUMNS = ((0.4, 0.7), (0.7, 1.0))  # left and right end of the totals' columns
MARGIN = 2  # cells for the strips beside the table: one strip, one gap

CONTROLS = {
    "step": Slider("pass", range(1, PASSES + 1), 5),
    "prompt": Slider("prompt", range(1, PROMPT + 1), PROMPT, unit="tokens"),
    "chunk": Slider("chunk", range(1, PROMPT + 1), PROMPT, unit="tokens at most"),
    "kv_heads": Slider("kv_heads", powers(1, 8), 4, snap=True),
    "cache": Toggle("cache", True),
}
PRESETS = {
    "prefill": {"step": 1, "prompt": PROMPT, "chunk": PROMPT, "cache": True},
    "first new token": {"step": 2, "prompt": PROMPT, "chunk": PROMPT, "cache": True},
    "late token": {"step": 13, "prompt": PROMPT, "chunk": PROMPT, "cache": True},
    "no cache": {"step": 13, "prompt": PROMPT, "chunk": PROMPT, "cache": False},
    "chunked prefill": {"step": 3, "prompt": PROMPT, "chunk": 4, "cache": True},
}
STILLS = {"no_cache": PRESETS["no cache"], "chunked_prefill": PRESETS["chunked prefill"]}


def ends(prompt: int, chunk: int) -> list[int]:
    """Length of the text after each pass: the prompt in chunks, then one token after the other."""
    read = [min(end, prompt) for end in range(chunk, prompt + chunk, chunk)]
    return (read + [prompt + i for i in range(1, PASSES + 1)])[:PASSES]


def compute(step: int, prompt: int, chunk: int, kv_heads: int, cache: bool) -> Result:
    """The table of scores of one head in pass `step`, and what all passes up to it have cost, both ways."""
    after = np.array(ends(prompt, chunk))
    before = np.concatenate([[0], after[:-1]])
    start, end = int(before[step - 1]), int(after[step - 1])
    new = end - start
    first = start if cache else 0  # the first position that goes through the model in this pass

    table = np.full((TOKENS, TOKENS), EMPTY)
    allowed = causal_mask(end, end).numpy()
    names = list(KINDS)
    table[:end, :end] = np.where(allowed, names.index("past"), EMPTY)
    rows = slice(first, end)
    seen = np.where(np.arange(end) < start, names.index("cached" if cache else "new"), names.index("new"))
    table[rows, :end] = np.where(allowed[rows], seen, names.index("masked"))
    if not cache:
        table[:start, :start][allowed[:start, :start]] = names.index("again")
    queries, slots = np.full(TOKENS, EMPTY), np.full(TOKENS, EMPTY)
    queries[:start] = names.index("past" if cache else "again")
    slots[:start] = names.index("cached" if cache else "again")
    queries[start:end] = slots[start:end] = names.index("new")

    per_token = 2 * LAYERS * kv_heads * HEAD_DIM * 4  # bytes: k and v, float32
    with_cache, without = LAYERS * np.cumsum(after - before), LAYERS * np.cumsum(after)
    read = per_token * np.cumsum(before)
    scores = np.cumsum((after - before) * after), np.cumsum(after**2)
    now = step - 1
    numbers = {
        "table": table,
        "queries": queries,
        "slots": slots,
        "rows": (first, end),
        "start": start,
        "length": after,
        "with": with_cache,
        "without": without,
        "now": now,
        "cache": float(cache),
        "token_layers": (with_cache[now], without[now]),
        "scores": (scores[0][now], scores[1][now]),
        "read": (read[now], 0),
        "kept": (per_token * end, 0),
    }
    if cache:
        said = f"Pass {step} computes q, k, v of {several(new)} and reads k, v of {start} from the cache"
        kept = f"Kept: {size(per_token * end)}, {size(per_token)} a token."
    else:
        said = f"Pass {step} computes q, k, v of {several(end)}, {start} of them again"
        kept = "Nothing is kept."
    said += (
        f": {(end - first) * end} scores a head. So far {with_cache[now]:,} token-layers with the cache, "
        f"{without[now]:,} without ({without[now] / with_cache[now]:.1f} times). {kept}"
    )
    return Result(numbers, said)


def several(tokens: int) -> str:
    """ "1 token", "4 tokens"."""
    return f"{tokens} token" + ("" if tokens == 1 else "s")


def size(count: float) -> str:
    """Bytes in words: three digits and a unit."""
    for unit, power in (("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{int(count)} B"


def draw(figure: Figure) -> dict:
    grid = figure.add_gridspec(2, 2, width_ratios=[1.12, 1], height_ratios=[1, 1])
    table, work = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1])
    totals = figure.add_subplot(grid[1, 1])
    handles = [Line2D([], [], color=style.color(look), marker=marker, ls="none") for look, marker, _ in KINDS.values()]
    figure.legend(
        handles,
        [words for _, _, words in KINDS.values()],
        loc="outside upper center",
        ncols=len(KINDS),
        handletextpad=0.2,
        columnspacing=1.6,
    )

    edge = TOKENS - 0.5
    table.set(title="Scores of one head", xlabel="position of k and v", ylabel="position of q", aspect="equal")
    table.set(xlim=(-MARGIN - 0.6, edge + 0.1), ylim=(edge + 0.1, -MARGIN - 0.6))
    table.set_xticks([-2, 0, 5, 10, 15, 20], labels=["q", "0", "5", "10", "15", "20"])
    table.set_yticks([-2, 0, 5, 10, 15, 20], labels=["k, v", "0", "5", "10", "15", "20"])
    table.tick_params(length=0)
    table.grid(False)
    table.spines[:].set_visible(False)
    for x, y, wide, high in ((0, 0, TOKENS, TOKENS), (0, -MARGIN, TOKENS, 1), (-MARGIN, 0, 1, TOKENS)):
        table.add_patch(Rectangle((x - 0.5, y - 0.5), wide, high, fill=False, edgecolor=style.GRID))
    blank = np.ones((TOKENS + MARGIN, TOKENS + MARGIN, 4))
    scene = {"cells": table.imshow(blank, extent=(-MARGIN - 0.5, edge, edge, -MARGIN - 0.5))}
    for kind, (look, marker, _) in KINDS.items():
        color = style.color(look)
        scene[kind] = table.plot([], [], marker, color=color, markersize=5 if marker in "os" else 4)[0]
    scene["frame"] = table.plot([], [], color=style.INK, linewidth=1.5)[0]

    work.set(title="Token-layers so far", xlabel="tokens in the text", xlim=(0, TOKENS + 1), ylim=(0, 2000))
    scene |= {
        "without": work.plot([], [], **style.line("wrong"))[0],
        "with": work.plot([], [], **style.line("after"))[0],
        "here": work.plot([], [], **style.points("highlight"), markersize=13)[0],
    }
    style.label(work, 0.8, 1750, "without cache", "wrong")
    style.label(work, 0.8, 1450, "with cache", "after")

    totals.set(xlim=(0, 1.03), ylim=(4.5, -0.5))
    totals.set(xticks=(), yticks=())
    totals.spines[:].set_visible(False)
    for row, name in enumerate(("so far", "token-layers", "scores a head", "K/V read", "K/V kept")):
        totals.text(0, row, name, va="center")
    scene["ground"] = totals.fill([0, 0, 0, 0], [0, 0, 0, 0], color=style.HIGHLIGHT_FILL, lw=0)[0]
    for (_, x), head, look in zip(COLUMNS, ("with", "without"), ("after", "wrong"), strict=True):
        options = {"va": "center", "ha": "right"}
        scene[f"{head} head"] = totals.text(x, 0, head, fontweight="bold", color=style.color(look), **options)
        scene[f"{head} column"] = [totals.text(x, row, "", **options) for row in range(1, 5)]
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    cells = np.full((TOKENS + MARGIN, TOKENS + MARGIN), EMPTY)
    cells[MARGIN:, MARGIN:] = n["table"]
    cells[0, MARGIN:], cells[MARGIN:, 0] = n["slots"], n["queries"]
    scene["cells"].set_data(PALE[cells])
    for i, kind in enumerate(KINDS):
        y, x = np.nonzero(cells == i)
        scene[kind].set_data(x - MARGIN, y - MARGIN)
    (top, bottom), right = n["rows"], n["rows"][1]
    left, top, bottom, right = -0.5, top - 0.5, bottom - 0.5, right - 0.5
    scene["frame"].set_data([left, right, right, left, left], [top, top, bottom, bottom, top])

    for way in ("with", "without"):
        scene[way].set_data(n["length"], n[way])
    now = n["now"]
    scene["here"].set_data([n["length"][now]], [n["with" if n["cache"] else "without"][now]])
    left, right = COLUMNS[0 if n["cache"] else 1]
    left, right = left + 0.02, right + 0.02
    scene["ground"].set_xy([(left, -0.45), (right, -0.45), (right, 4.45), (left, 4.45)])
    for i, head in enumerate(("with", "without")):
        words = f"{n['token_layers'][i]:,}", f"{n['scores'][i]:,}", size(n["read"][i]), size(n["kept"][i])
        for text, word in zip(scene[f"{head} column"], words, strict=True):
            text.set_text(word)


def _pale() -> np.ndarray:
    """[kind, rgba]: the ground of each kind of cell; clear for masked cells and where nothing is."""
    shares = {"new": 0.35, "cached": 0.3, "past": 0.12, "again": 0.25, "masked": 0.0}
    grounds = [(*colors.to_rgb(style.color(KINDS[kind][0])), share) for kind, share in shares.items()]
    return np.array([*grounds, (1.0, 1.0, 1.0, 0.0)])


PALE = _pale()


def explore(**start) -> Explorer:
    """Write a text pass by pass and see which scores, queries, keys and values are computed, read and kept.

    The numbers are those of MiniMind-3 (8 layers, head_dim 96, float32) with `kv_heads` K/V heads. Pass 1 begins the
    prompt; after it each pass adds one token. start: controls to begin with, for example explore(step=2).
    """
    return Explorer(
        "kv_cache",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.6),
        start=start,
    )
