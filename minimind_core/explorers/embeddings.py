"""Explorer of notebook 10: one row of a tied matrix, its gradient from either end, and its neighbors in training."""

import threading
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ..config import MiniMindConfig
from ..model import MiniMindForCausalLM
from ..training import parameter_groups
from . import style
from .shell import Choice, Explorer, Result, Slider, Text, Toggle

STORY = """
The log of a small harbor. On day 1 the wind came from the west, and 3 boats went out before the sun was up. By noon 2
of them were back with 40 kilos of herring. The third came home at 6 in the evening, and nobody had seen a bigger cod
than hers. On day 2 there was fog until 9. The bell rang 5 times in every hour, and 1 old man sat on the wall and told
the children how it was in 1948, when the ice was 70 centimeters thick and a horse could walk over to the island. On day
3 the fog was gone. We had 12 boats in the harbor, 4 of them from the other side of the bay, with salt, paint and 37
sacks of flour. The women of the 4 boats sang while they carried the sacks. On day 4 it rained from 7 in the morning to
8 in the evening. The nets were mended, 15 of them, and the men drank 29 cups of tea. On day 5 a boat came in that
nobody knew. She was green, 9 meters long, and on her bow stood the number 87. There was no one on board, only a cat, a
loaf of bread and a letter. The letter was wet and said no more than this. Give the cat her dinner at 6, and be good to
her. So we did. On day 6 the cat had a name, and on day 7 she had a bed in the room of the harbor master, who had said
at first that he did not like cats at all. On day 8 the wind turned to the north, 10 boats went out and 10 came back. It
was the best day of the year, with 579 kilos of cod and herring, and the cat ate as much as she could. On day 9 the man
of the green boat came on foot, 35 kilometers over the hills. He had fallen into the sea, he told us, and had been
carried to the shore by the tide. He sat by the fire, and the cat sat on his feet. On day 10 the 2 of them sailed home.
We stood on the wall and waved until we could see them no more. Then it was 4 in the afternoon, and there were 28 nets
to be mended.
"""  # no j, no q, no x, no z
VOCAB = " abcdefghijklmnopqrstuvwxyz.,?0123456789"  # drawn as a table; "?" stands for every other character
ROWS, COLUMNS = 4, 10
NAMES = ("space", *VOCAB[1:])
HIDDEN, SHOWN, NEAREST = 32, 12, 5
MOST, SLICE = 240, 8  # steps of training, and steps between two pictures
BATCH, LENGTH, RATE, DECAY = 8, 32, 0.01, 0.1
STD = 0.02  # of every weight but the embedding's, which has a control of its own
CONFIG = MiniMindConfig(
    vocab_size=len(VOCAB),
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    initializer_range=STD,
)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

CONTROLS = {
    "token": Choice("token", NAMES, "a"),
    "text": Text("text", "a cat sat on a mat.", 40),
    "steps": Slider("training steps", range(0, MOST + 1, SLICE), 120, snap=True),
    "std": Choice("first std", (0.02, 0.2, 1.0), 0.02),
    "tied": Toggle("tied", True),
}
PRESETS = {
    "untrained": {"token": "a", "steps": 0, "std": 0.02, "tied": True},
    "a digit": {"token": "7", "steps": 120, "std": 0.02, "tied": True},
    "never read": {"token": "q", "steps": 120, "std": 0.02, "tied": True},
    "never read, untied": {"token": "q", "steps": 120, "std": 0.02, "tied": False},
    "std 1": {"token": "a", "steps": 0, "std": 1.0, "tied": True},
}
STILLS = {name.replace(",", "").replace(" ", "_"): PRESETS[name] for name in ("never read", "never read, untied")}


def to_ids(text: str) -> torch.Tensor:
    """[1, seq]: the numbers of a text's characters, in small letters."""
    return torch.tensor([[VOCAB.find(char) if char in VOCAB else VOCAB.index("?") for char in text.lower()]])


def untrained(tied: bool, std: float) -> MiniMindForCausalLM:
    """A model in float64: the same random numbers each time, those of the embedding scaled to std.

    The untied one begins with the tied one's numbers; its head keeps N(0, 0.02^2) whatever std is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        first = MiniMindForCausalLM(CONFIG)
        model = MiniMindForCausalLM(CONFIG.replace(tie_word_embeddings=tied)).double()
    state = {name: value.double() for name, value in first.state_dict().items()}
    scaled = state[EMBEDDING] * (std / STD)
    model.load_state_dict(state | {EMBEDDING: scaled, HEAD: scaled if tied else state[HEAD]})
    return model


class Training:
    """Real training on STORY, done as far as somebody has asked for, and kept."""

    def __init__(self, tied: bool, std: float):
        self.model = untrained(tied, std)
        self.data = to_ids(" ".join(STORY.split()))[0]
        self.generator = torch.Generator().manual_seed(0)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, DECAY), lr=RATE, betas=(0.9, 0.95))
        self.states = [self._copy()]
        self.lock = threading.Lock()

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def state(self, slices: int) -> dict[str, torch.Tensor]:
        """The weights after so many slices of SLICE steps."""
        with self.lock:
            while len(self.states) <= slices:
                for _ in range(SLICE):
                    self._step()
                self.states.append(self._copy())
        return self.states[slices]

    def _step(self) -> None:
        places = torch.randint(len(self.data) - LENGTH, (BATCH, 1), generator=self.generator)
        ids = self.data[places + torch.arange(LENGTH)]
        self.optimizer.zero_grad()
        self.model(ids, labels=ids).loss.backward()
        self.optimizer.step()


@lru_cache(maxsize=8)
def training(tied: bool, std: float) -> Training:
    """The one training with these settings."""
    return Training(tied, std)


@lru_cache(maxsize=1)
def two_ends() -> MiniMindForCausalLM:
    """A model in which embedding and head are two Parameters, to see the gradient of each."""
    return untrained(tied=False, std=STD)


def gradients(state: dict[str, torch.Tensor], ids: torch.Tensor) -> tuple[float, np.ndarray, np.ndarray]:
    """Loss of a text, and its gradient from the embedding end and from the head end: [vocab, hidden] each."""
    ends = {name: state[name].clone().requires_grad_() for name in (EMBEDDING, HEAD)}
    loss = torch.func.functional_call(two_ends(), state | ends, (ids,), {"labels": ids}).loss
    return loss.item(), *(grad.numpy() for grad in torch.autograd.grad(loss, tuple(ends.values())))


@lru_cache(maxsize=256)
def gradients_after(slices: int, text: str, std: float, tied: bool) -> tuple[float, np.ndarray, np.ndarray]:
    """Those of the model after so many slices of training; kept, since each picture shows the first ones again."""
    return gradients(training(tied, std).state(slices), to_ids(text))


def cosines(rows: np.ndarray, token: int) -> np.ndarray:
    """[vocab]: the cosine of the angle between one row and each. Of a row with itself: -1, so that it comes last."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(np.arange(len(rows)) == token, -1.0, unit @ unit[token])


def nearest(rows: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
    """The NEAREST other tokens, and their cosines."""
    cosine = cosines(rows, token)
    order = np.argsort(-cosine, kind="stable")[:NEAREST]
    return order, cosine[order]


def look(token: int, text: str, slices: int, std: float, tied: bool) -> Result:
    """What there is to see after so many slices of training."""
    text = text + " "  # every character of the text is read; the space is only foretold
    ids, run = to_ids(text), training(tied, std)
    state, first = run.state(slices), run.states[0]
    loss, *ends = gradients_after(slices, text, std, tied)
    lengths = [np.linalg.norm(end, axis=1) for end in ends]
    both = ends[0][token] + ends[1][token]
    rows = [weights[EMBEDDING].numpy() for weights in (first, state)]
    near = [nearest(each, token) for each in rows]
    count = int((ids[0, :-1] == token).sum())
    numbers = {
        "token": token,
        "rows": [each[token] for each in rows],
        "ends": [end[token] for end in ends],
        "sum": both,
        "lengths": lengths,
        "near": [order for order, _ in near],
        "cosine": [cosine for _, cosine in near],
        "loss": (gradients_after(0, text, std, tied)[0], loss),
        "tied": tied,
    }
    stands = f"stands {count} time{'s' * (count != 1)} in the text" if count else "is not in the text"
    away = f"{lengths[0][token]:.2g} from the embedding end, {lengths[1][token]:.2g} from the head end"
    away += f", {np.linalg.norm(both):.2g} the sum" if tied else "; each stays with its own matrix"
    names = [" ".join(NAMES[other] for other in order) for order, _ in near]
    words = (
        f"{NAMES[token]!r} {stands}. Its gradient: {away}. "
        f"Rows that get one: {(lengths[0] > 0).sum()} of {len(VOCAB)} from the embedding end, "
        f"{(lengths[1] > 0).sum()} from the head end. Nearest: {names[1]} (at first {names[0]}). "
        f"Loss {loss:.2f} (at first {numbers['loss'][0]:.2f})."
    )
    return Result(numbers, words)


def work(token: str, text: str, steps: int, std: float, tied: bool) -> Iterator[tuple[float, Result]]:
    """Train up to `steps`; yield (share done, Result) after every slice that was not known before."""
    last = round(steps / SLICE)
    known = min(len(training(tied, std).states) - 1, last)
    for slices in range(min(known + 1, last), last + 1):
        share = (slices - known) / (last - known) if last > known else 1.0
        yield share, look(NAMES.index(token), text, slices, std, tied)


def draw(figure: Figure) -> dict:
    """Row, gradient and neighbors of one token; below, the lengths of all rows' gradients. Returns what moves."""
    whole = figure.add_gridspec(3, 2, width_ratios=(1.35, 1), height_ratios=(0.62, 1.2, 1.3))
    row, grad = (figure.add_subplot(whole[line, 0]) for line in (0, 1))
    beside = whole[:2, 1].subgridspec(1, 2)
    lists = [figure.add_subplot(beside[0, column]) for column in (0, 1)]
    tables = [figure.add_subplot(whole[2, column]) for column in (0, 1)]
    scene: dict = {"row": [], "sticks": [], "near": [], "tables": []}
    places = np.arange(SHOWN)

    row.set(title="Its row", xlim=(-0.7, SHOWN - 0.3), ylim=(-1.2, 1.2), xticks=[], yticks=[0], yticklabels=["0"])
    scene["lengths"] = []
    for meaning, x in (("before", 0.31), ("after", 0.79)):
        scene["row"] += row.plot(places, 0.0 * places, **style.points(meaning))
        scene["lengths"].append(_key(row, x, 1.18, "", meaning)[1])

    grad.set(title="Its gradient", xlim=row.get_xlim(), ylim=(-1.15, 1.15), xticks=[], yticks=[0], yticklabels=["0"])
    grad.set_xlabel(f"{SHOWN} of its {HIDDEN} numbers, divided by the largest")
    grad.axhline(0, color=style.QUIET, linewidth=1)
    for end, side, x in (("embedding", -0.22, 0.34), ("head", 0.22, 0.67)):
        scene["sticks"].append((side, _sticks(grad, f"{end} end")))
        _key(grad, x, 1.1, end, f"{end} end")
    scene["sum"] = grad.plot(places, 0.0 * places, **style.points("residual")) + _key(
        grad, 0.87, 1.1, "sum", "residual"
    )

    for axes, title, meaning in zip(lists, ("Nearest at first", "Nearest now"), ("before", "after"), strict=True):
        axes.set(title=title, xlim=(0, 1.05), ylim=(NEAREST - 0.5, -0.5), xticks=[0, 1], yticks=[])
        names = [axes.text(-0.08, place, "", ha="right", va="center") for place in range(NEAREST)]
        scene["near"].append({"names": names, "sticks": _sticks(axes, meaning)})
    lists[0].set_xlabel("cosine")

    for axes, meaning in zip(tables, ("embedding end", "head end"), strict=True):
        scene["tables"].append(_table(axes, meaning, f"From the {meaning}"))
    return scene


def _key(axes: Axes, x: float, y: float, words: str, meaning: str) -> list[Artist]:
    """A marker and its name above the axes, beside the title."""
    (marker,) = axes.plot(x - 0.025, y, **style.points(meaning), transform=axes.transAxes, clip_on=False)
    return [marker, style.label(axes, x, y, words, meaning, transform=axes.transAxes)]


def _sticks(axes: Axes, meaning: str) -> Line2D:
    """Lines that end in a marker. One artist: many bars would take longer to draw than all the rest."""
    look = style.line(meaning, marker=True) | {"linestyle": "-"}
    return axes.plot([], [], **look, markevery=(1, 3))[0]


def _ends(values: np.ndarray) -> np.ndarray:
    """From 0 to each value, with a gap behind it: the ends of `_sticks`."""
    return np.stack([0 * values, values, np.full(len(values), np.nan)], axis=1).ravel()


def _table(axes: Axes, meaning: str, title: str) -> dict:
    """All tokens, each on a ground that is darker the longer its gradient is; a mark in each that has one."""
    color = to_rgb(style.color(meaning))
    colors = LinearSegmentedColormap.from_list(meaning, [(*color, 0.0), (*color, 0.5)])  # the letters shine through
    axes.set_title(title)
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    ground = axes.imshow(np.zeros((ROWS, COLUMNS)), cmap=colors, norm=PowerNorm(0.5, 0, 1), aspect="auto")
    for place, char in enumerate(VOCAB):
        y, x = divmod(place, COLUMNS)
        axes.text(x - 0.08, y, _letter(char), ha="center", va="center")
    (dots,) = axes.plot([], [], **style.points(meaning), markersize=4)
    box = axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=style.INK, linewidth=2.5, zorder=3))
    box.set_clip_on(False)
    return {"ground": ground, "dots": dots, "box": box}


def _letter(char: str) -> str:
    return "␣" if char == " " else char


def _scaled(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Arrays over the largest number in any of them."""
    most = max(np.abs(array).max() for array in arrays)
    return [array / most if most else array for array in arrays]


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    n = result.numbers
    for points, values in zip(scene["row"], _scaled(n["rows"]), strict=True):
        points.set_ydata(values[:SHOWN])
    for words, name, values in zip(scene["lengths"], ("at first: length", "now"), n["rows"], strict=True):
        words.set_text(f"{name} {np.linalg.norm(values):.2f}")

    *ends, both = _scaled([*n["ends"], n["sum"]])
    for (side, sticks), values in zip(scene["sticks"], ends, strict=True):
        sticks.set_data(np.repeat(np.arange(SHOWN) + side, 3), _ends(values[:SHOWN]))
    scene["sum"][0].set_ydata(both[:SHOWN])
    for artist in scene["sum"]:
        artist.set_visible(bool(n["tied"]))

    for part, order, cosine in zip(scene["near"], n["near"], n["cosine"], strict=True):
        for name, other in zip(part["names"], order, strict=True):
            name.set_text(_letter(VOCAB[other]))
        part["sticks"].set_data(_ends(np.maximum(cosine, 0)), np.repeat(np.arange(NEAREST), 3))

    y, x = divmod(n["token"], COLUMNS)
    for part, lengths in zip(scene["tables"], n["lengths"], strict=True):
        part["ground"].set_data((lengths / lengths.max()).reshape(ROWS, COLUMNS))
        there = np.flatnonzero(lengths)
        part["dots"].set_data(there % COLUMNS + 0.3, there // COLUMNS + 0.25)
        part["box"].set_xy((x - 0.5, y - 0.5))


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with, named as in CONTROLS."""
    return Explorer(
        "embeddings",
        controls=CONTROLS,
        presets=PRESETS,
        work=work,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.8),
        start=start,
    )
