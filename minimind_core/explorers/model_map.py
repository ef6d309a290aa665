"""The map of the model, figures/map.png: the residual stream, the parts beside it, and the notebook of each part."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from ..config import MiniMindConfig
from . import style

SIZE = (style.WIDTH, 7.0)  # inches
CONFIG = MiniMindConfig()
IDS = "[4, 340]"
HIDDEN = f"[4, 340, {CONFIG.hidden_size}]"
LOGITS = f"[4, 340, {CONFIG.vocab_size}]"
ALT = (
    f"Map of MiniMind. Token ids {IDS} become vectors {HIDDEN} in the embedding. They flow down one thick line, the "
    f"residual stream, through {CONFIG.num_hidden_layers} blocks. Each block takes a copy, norms it, sends it through "
    "attention and adds the result to the stream; then the same with the feed-forward. A last norm and the head, which "
    f"is the embedding's matrix again, give logits {LOGITS}, and these the loss, one number. "
    "Yellow tags name the notebook of each part."
)
STREAM = 2.9  # x of the residual stream
SMALL = {"fontsize": 10, "va": "center"}


def draw(figure: Figure) -> None:
    """Draw the map. Shapes are those of 4 texts of 340 tokens."""
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(10.35, -0.25))
    axes.axis("off")
    arrow(axes, (STREAM, 0.35), (STREAM, 9.95), width=4)
    on_stream(axes, 0.3, "token ids", "before", "13", IDS)
    on_stream(axes, 1.25, "embedding", "up", "10", HIDDEN)

    axes.add_patch(Rectangle((0.5, 2.15), 9.3, 5.2, fill=False, edgecolor=style.QUIET, linestyle="--"))
    axes.text(0.75, 2.5, f"{CONFIG.num_hidden_layers} blocks,\none after\nthe other", va="top", color=style.QUIET)
    tag(axes, 1.0, 2.15, "07")
    branch(
        axes,
        2.6,
        "attention",
        "query",
        "q, k, v for each token\nnorm q and k, turn them\nlook back, mix the v",
        "02 03 04 05",
    )
    inside = (
        f"gate and value, {CONFIG.intermediate_size} wide,\nand back to {CONFIG.hidden_size};\nor a mixture of experts"
    )
    branch(axes, 5.15, "feed-forward", "gate", inside, "06 08 09")

    on_stream(axes, 7.9, "norm", "norm", "01", HIDDEN)
    on_stream(axes, 8.9, "head", "up", "10", LOGITS)
    arrow(axes, (STREAM, 9.45), (5.3, 9.45))
    box(axes, 6.45, 9.45, 2.3, 0.55, "loss", "highlight", "11")
    axes.text(9.55, 9.45, "one number", ha="right", va="center", color=style.QUIET)
    axes.text(STREAM, 10.15, "logits: one score per token of the vocabulary", ha="center", **SMALL)

    left, edge = 0.1, STREAM - 1.45
    axes.plot([edge, left, left, edge], [1.25, 1.25, 8.9, 8.9], color=style.color("up"), linestyle=":", linewidth=2)
    axes.text(0.3, 7.75, "one matrix,\nused twice", color=style.color("up"), **SMALL)
    for y, number, text in ((7.8, "12", "the whole model"), (8.25, "14", "training"), (8.7, "15", "generation")):
        tag(axes, 7.3, y, number)
        axes.text(7.5, y, text, **SMALL)


def on_stream(axes: Axes, y: float, text: str, look: str, notebooks: str, shape: str) -> None:
    """A part through which the stream itself runs, and the shape of the stream below it."""
    box(axes, STREAM, y, 2.9, 0.55, text, look, notebooks)
    axes.text(STREAM - 0.25, y + 0.54, shape, ha="right", va="center", color=style.QUIET)


def branch(axes: Axes, y: float, part: str, look: str, inside: str, notebooks: str) -> None:
    """A part that reads a copy of the stream and adds its result to it."""
    back = y + 1.85
    arrow(axes, (STREAM, y), (4.35, y), look="norm")
    axes.text(STREAM + 0.15, y - 0.22, "a copy", color=style.QUIET, **SMALL)
    box(axes, 4.95, y, 1.2, 0.6, "norm", "norm", "01")
    arrow(axes, (5.55, y), (6.2, y), look=look)
    box(axes, 7.8, y + 0.6, 3.2, 1.75, "", look, notebooks)
    axes.text(7.8, y + 0.1, part, ha="center", va="center", fontweight="bold", zorder=5)
    axes.text(7.8, y + 0.9, inside, ha="center", zorder=5, linespacing=1.35, **SMALL)
    arrow(axes, (7.8, y + 1.475), (7.8, back), (STREAM + 0.2, back), look=look)
    axes.text(5.4, back - 0.22, "added to the stream", ha="center", color=style.QUIET, **SMALL)
    axes.plot(STREAM, back, "o", markersize=17, color="white", markeredgecolor=style.INK, markeredgewidth=1.8, zorder=4)
    axes.text(STREAM, back, "+", ha="center", va="center", fontsize=14, fontweight="bold", zorder=5)
    axes.text(STREAM - 0.25, back, HIDDEN, ha="right", va="center", color=style.QUIET)


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, look: str, notebooks: str) -> None:
    """A part, centered at x, y, with a tag that names its notebooks."""
    place = ((x - width / 2, y - height / 2), width, height)
    axes.add_patch(Rectangle(*place, facecolor="white", zorder=3))  # hides the stream behind the pale face
    axes.add_patch(Rectangle(*place, zorder=4, **style.fill(look, 0.15) | {"hatch": ""}))
    axes.text(x, y, text, ha="center", va="center", zorder=5)
    tag(axes, x + width / 2, y - height / 2, notebooks)


def tag(axes: Axes, x: float, y: float, notebooks: str) -> None:
    ground = {"boxstyle": "round,pad=0.25", "facecolor": style.HIGHLIGHT_FILL, "edgecolor": style.INK, "linewidth": 0.8}
    axes.text(x, y, notebooks, ha="right", fontweight="bold", bbox=ground, zorder=6, **SMALL)


def arrow(axes: Axes, *points: tuple[float, float], look: str = "residual", width: float = 1.5) -> None:
    """A line through all points, with an arrow head at the last."""
    line = {"color": style.color(look), "linewidth": width, "zorder": 2}
    axes.plot(*zip(*points[:-1], strict=True), **line)
    axes.add_patch(FancyArrowPatch(*points[-2:], arrowstyle="-|>", mutation_scale=14, shrinkA=0, shrinkB=0, **line))
