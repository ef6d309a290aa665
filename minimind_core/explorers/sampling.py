"""Explorer of notebook 15: the next byte after the reader's own prompt, what each filter leaves of it, and texts."""

import codecs
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ..generation import keep_top_k, keep_top_p, penalize_repetition
from . import style
from .shell import Explorer, Result, Slider, Text, linear
from .texts import drawable, model

TEXTS, BYTES, SLICE = 6, 32, 2  # bytes of each text, and how many are written before a picture
BARS, VOCAB = 24, 256  # the bar behind them is all the rest

CONTROLS = {
    "prompt": Text("prompt", "The following statement ", 56),  # at most 224 bytes: with the text 256, as trained
    "temperature": Slider("temperature", linear(0, 2, 0.05), 0.85, snap=True),
    "top_k": Slider("top_k (0: all)", range(VOCAB + 1), 50, unit="bytes"),
    "top_p": Slider("top_p (1: all)", linear(0.05, 1, 0.05), 0.85),
    "penalty": Slider("repetition penalty", linear(1, 2, 0.05), 1.0),
    "seed": Slider("draw again", range(100), 0),
}
PRESETS = {
    "greedy": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "penalty": 1.0},
    "cautious": {"temperature": 0.5, "top_k": 10, "top_p": 0.7, "penalty": 1.0},
    "MiniMind": {"temperature": 0.85, "top_k": 50, "top_p": 0.85, "penalty": 1.0},
    "wild": {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "penalty": 1.0},
    "greedy, penalty": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "penalty": 1.5},
}
STILLS = {name: PRESETS[name] for name in ("greedy", "wild")}


@lru_cache(maxsize=32 * BYTES)  # so many settings can be gone back to
def read(prompt: bytes, written: tuple[bytes, ...]) -> tuple[torch.Tensor, tuple]:
    """Logits [texts, vocab] after the prompt and what is written, and the cache. Texts that begin alike share it."""
    past, new = None, [prompt] * len(written)
    if written[0]:
        past, new = read(prompt, tuple(row[:-1] for row in written))[1], [row[-1:] for row in written]
    with torch.inference_mode():
        output = model()(torch.tensor([list(row) for row in new]), past_key_values=past, use_cache=True)
    return output.logits[:, -1], output.past_key_values


def penalized(prompt: bytes, written: tuple[bytes, ...], penalty: float) -> torch.Tensor:
    """The logits after these bytes, lower for every byte that has occurred."""
    if penalty == 1:
        return read(prompt, written)[0]
    ids = torch.tensor([list(prompt + row) for row in written])
    return penalize_repetition(read(prompt, written)[0], ids, penalty)


def filtered(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [..., vocab] after temperature and top-k, and after top-p too; what is dropped is -inf. 0 is greedy."""
    by_k = keep_top_k(logits, 1) if temperature == 0 else keep_top_k(logits / temperature, top_k)
    return by_k, keep_top_p(by_k, top_p)


def write(
    prompt: bytes, temperature: float, top_k: int, top_p: float, penalty: float, seed: int
) -> Iterator[tuple[tuple[bytes, ...], float]]:
    """Several texts at once, one byte longer each time, as `generate` with num_return_sequences draws them.

    Yields the texts, and how surprising their new bytes are to the model itself: the mean of -ln of its probability.
    """
    generator = torch.Generator().manual_seed(seed)
    written = (b"",) * TEXTS
    for _ in range(BYTES):
        logits = penalized(prompt, written, penalty)
        if temperature == 0:
            new = logits.argmax(dim=-1, keepdim=True)
        else:
            new = torch.multinomial(
                filtered(logits, temperature, top_k, top_p)[1].softmax(dim=-1), 1, generator=generator
            )
        surprise = -read(prompt, written)[0].log_softmax(dim=-1).gather(-1, new).mean().item()
        written = tuple(row + bytes([byte]) for row, byte in zip(written, new[:, 0].tolist(), strict=True))
        yield written, surprise


def perplexity(probs: np.ndarray) -> float:
    """e to the entropy: as open as a choice between so many equal ones."""
    some = probs[probs > 0]
    return float(np.exp(-(some * np.log(some)).sum()))


def named(byte: int) -> str:
    """A byte in a sentence."""
    return {32: "the space", 10: "the line end"}.get(byte) or (
        f"'{chr(byte)}'" if 32 < byte < 127 else f"the byte {byte:02x}"
    )


def work(
    prompt: str, temperature: float, top_k: int, top_p: float, penalty: float, seed: int
) -> Iterator[tuple[float, Result]]:
    """The next byte, then the texts; yields (share done, Result) after every SLICE bytes."""
    read_bytes = prompt.encode(errors="replace")
    own = read(read_bytes, (b"",) * TEXTS)[0][0].double().softmax(dim=-1).numpy()
    after = penalized(read_bytes, (b"",) * TEXTS, penalty)[:1]
    by_k, by_p = (part[0].double() for part in filtered(after, temperature, top_k, top_p))
    order = after[0].sort(descending=True, stable=True).indices.numpy()
    mass, left = by_k.softmax(dim=-1).numpy()[order].cumsum(), by_p.softmax(dim=-1).numpy()[order]
    own = own[order]
    k_left, p_left = (int(part.isfinite().sum()) for part in (by_k, by_p))
    first = f"{named(int(order[0]))} first, {left[0]:.0%} (the model's own: {own[0]:.0%})"
    words = f"Top-k leaves {k_left} of {VOCAB} bytes, top-p {p_left} of them: {first}. "
    if temperature == 0:
        words = f"Temperature 0 takes the largest: {first}; top-k {top_k}, top-p {top_p:g}, draw {seed} are not used. "
    words += f"Perplexity {perplexity(own):.1f} before, {perplexity(left):.1f} after. "
    numbers = {
        "bytes": order[:BARS],
        "own": [*own[:BARS], own[BARS:].sum()],
        "left": [*left[:BARS], left[BARS:].sum()],
        "mass": mass[:BARS],
        "k_left": k_left,
        "p_left": p_left,
        "top_p": top_p,
        "greedy": temperature == 0,
    }
    surprises = []
    for written, surprise in write(read_bytes, temperature, top_k, top_p, penalty, seed):
        surprises.append(surprise)
        if len(surprises) % SLICE == 0:
            different = f"{len(set(written))} different" if len(set(written)) > 1 else "all alike"
            texts = f"{TEXTS} texts of {len(surprises)} bytes, {different}; "
            texts += f"their perplexity to the model itself is {np.exp(np.mean(surprises)):.1f}."
            numbers = numbers | {"texts": np.array([list(row) for row in written]), "surprise": np.mean(surprises)}
            yield len(surprises) / BYTES, Result(numbers, words + texts)


@lru_cache(maxsize=VOCAB)
def symbol(byte: int) -> str:
    """What stands under a bar: the character, or two hexadecimal digits."""
    return {32: "␣", 10: "↵"}.get(byte) or (chr(byte) if 32 < byte < 127 else f"{byte:02x}")


def line(text: bytes) -> str:
    """A text on one line of the picture. A character whose last byte is still to come is left out."""
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(text)
    return "".join({" ": " ", "\n": "↵", "\ufffd": "□"}.get(char) or drawable(char) for char in whole)


def draw(figure: Figure) -> dict:
    """Two panels: the next byte, and the texts. Returns what moves."""
    top, bottom = figure.subplots(2, 1, height_ratios=(2.6, 1))
    places = np.arange(1, BARS + 2)
    scene = {}

    top.set(title="The next byte: what is left of the distribution", xlim=(0.4, BARS + 1.6), ylim=(-0.11, 1.29))
    top.set(xticks=[], yticks=[0, 0.25, 0.5, 0.75, 1], ylabel="probability")
    top.grid(False, axis="x")
    scene["kept"] = top.add_patch(Rectangle((0.4, 0), 1, 1, facecolor=style.HIGHLIGHT_FILL, zorder=0.6))
    scene["bars"] = top.bar(places, np.zeros(BARS + 1), width=0.72, **style.fill("after", 0.8))
    (scene["own"],) = top.plot([], [], **style.points("before"), markersize=5, markerfacecolor="white")
    (scene["mass"],) = top.plot([], [], **style.line("gate"), linewidth=1.8)
    (scene["p"],) = top.plot([], [], **style.line("reference"), linewidth=1.5)
    (scene["cut"],) = top.plot([], [], **style.line("key"), linewidth=1.8)
    scene["symbols"] = [
        top.text(place, -0.06, "", ha="center", va="center_baseline", parse_math=False) for place in places[:BARS]
    ]
    top.text(BARS + 1, -0.06, "rest", ha="center", va="center_baseline")
    keys = {"left": 0.7, "own": 6.0, "mass": 12.6, "p": 18.0, "cut": 21.8}
    height = 1.19
    top.add_patch(Rectangle((keys["left"], height - 0.04), 0.8, 0.08, **style.fill("after", 0.8)))
    top.plot([keys["own"] + 0.6], [height], **style.points("before"), markersize=5, markerfacecolor="white")
    for name, meaning in (("mass", "gate"), ("p", "reference"), ("cut", "key")):
        top.plot([keys[name], keys[name] + 0.9], [height] * 2, **style.line(meaning), linewidth=1.8)
    for name, words, meaning in (
        ("left", "what is left", "after"),
        ("own", "the model's own", "before"),
        ("mass", "mass so far", "gate"),
        ("p", "top_p", "reference"),
        ("cut", "top_k", "key"),
    ):
        style.label(top, keys[name] + 1.1, height, words, meaning)

    rows = TEXTS // 2
    bottom.set(title="Texts that follow the prompt", xlim=(0, 2), ylim=(rows - 0.5, -0.5), xticks=[], yticks=[])
    bottom.grid(False)
    for side in ("left", "bottom"):
        bottom.spines[side].set_visible(False)
    mono = {"family": ["DejaVu Sans Mono", "DejaVu Sans"], "va": "center", "parse_math": False}
    places = [(number // rows, number % rows) for number in range(TEXTS)]
    for number, (column, row) in enumerate(places, start=1):
        bottom.text(column, row, f"{number}", color=style.QUIET, va="center")
    scene["texts"] = [bottom.text(column + 0.06, row, "", **mono) for column, row in places]
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers = result.numbers
    places = np.arange(1, BARS + 2)
    kept, k_left = numbers["p_left"], numbers["k_left"]
    for bar, value in zip(scene["bars"], numbers["left"], strict=True):
        bar.set_height(value)
        bar.set_visible(value > 0)
    scene["own"].set_data(places, numbers["own"])
    scene["kept"].set_width(min(kept, BARS + 1) + 0.1)
    hidden = ([], [])
    shown = not numbers["greedy"]
    scene["mass"].set_data(*((places[:BARS], numbers["mass"]) if shown else hidden))
    scene["p"].set_data(*(([0.4, BARS + 1.6], [numbers["top_p"]] * 2) if shown else hidden))
    scene["cut"].set_data(*(([k_left + 0.5] * 2, [0, 1.06]) if shown and k_left <= BARS else hidden))
    for text, byte in zip(scene["symbols"], numbers["bytes"], strict=True):
        text.set_text(symbol(int(byte)))
    for text, row in zip(scene["texts"], numbers["texts"], strict=True):
        text.set_text(line(bytes(row.tolist())))


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with, named as in CONTROLS."""
    return Explorer(
        "sampling",
        controls=CONTROLS,
        presets=PRESETS,
        work=work,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.4),
        start=start,
    )
