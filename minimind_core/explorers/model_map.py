"""The map of the model, figures/map.png: the residual stream, the parts beside it, and the notebook of each part."""

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from . import style

SIZE = (style.WIDTH, 7.0)
ALT = (
    "Map of MiniMind. Token ids [4, 340] become vectors [4, 340, 768] in the embedding. They flow down one thick line, the "
    "residual stream, through 8 blocks. Each block takes a copy, norms it, sends it through attention and adds the result "
    "to the stream; then the same with the feed-forward. A last norm, and the head, which is the embedding's matrix again, "
    "gives logits [4, 340, 6400]; they give the loss, one number. Yellow tags name the notebook of each part."
)


def draw(figure: Figure) -> None:
    """The map of the model: the residual stream runs straight down, the parts read it and add to it.

    Numbers in yellow are the notebooks that teach a part. Shapes are those of 4 texts of 340 tokens.
    """
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(10.35, -0.25))
    axes.axis("off")
    stream, right = 2.9, 9.55

    def box(x: float, y: float, width: float, height: float, text: str, look: str, notebooks: str = "") -> None:
        fill = style.fill(look, 0.15) | {"hatch": ""}
        axes.add_patch(Rectangle((x - width / 2, y - height / 2), width, height, facecolor="white", zorder=3))
        axes.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, "round,pad=0", zorder=4, **fill))
        axes.text(x, y, text, ha="center", va="center", zorder=5)
        if notebooks:
            tag(x + width / 2, y - height / 2, notebooks)

    def tag(x: float, y: float, notebooks: str) -> None:
        ground = {
            "boxstyle": "round,pad=0.25",
            "facecolor": style.HIGHLIGHT_FILL,
            "edgecolor": style.INK,
            "linewidth": 0.8,
        }
        axes.text(x, y, notebooks, ha="right", va="center", fontsize=10, fontweight="bold", bbox=ground, zorder=6)

    def arrow(*points: tuple[float, float], look: str = "residual", width: float = 1.5) -> None:
        color = style.color(look)
        axes.plot(*zip(*points[:-1], strict=True), color=color, linewidth=width, solid_joinstyle="round", zorder=2)
        end = {"arrowstyle": "-|>", "mutation_scale": 14, "shrinkA": 0, "shrinkB": 0}
        axes.add_patch(FancyArrowPatch(points[-2], points[-1], color=color, linewidth=width, zorder=2, **end))

    def shape(y: float, text: str) -> None:
        axes.text(stream - 0.25, y, text, ha="right", va="center", color=style.QUIET, zorder=5)

    arrow((stream, 0.35), (stream, 9.95), width=4)
    box(stream, 0.3, 2.9, 0.5, "token ids", "before", "13")
    shape(0.8, "[4, 340]")
    box(stream, 1.25, 2.9, 0.55, "embedding", "up", "10")
    shape(1.8, "[4, 340, 768]")

    axes.add_patch(
        FancyBboxPatch((0.5, 2.15), 9.3, 5.2, "round,pad=0,rounding_size=0.2", fill=False, ec=style.QUIET, ls="--")
    )
    axes.text(0.75, 2.5, "8 blocks,\none after\nthe other", va="top", color=style.QUIET)
    tag(1.0, 2.15, "07")
    for y, part, look, inside, numbers in (
        (
            2.65,
            "attention",
            "query",
            "q, k, v from each token\nnorm q and k, turn them\nlook back, mix the values",
            "02 03 04 05",
        ),
        (5.2, "feed-forward", "gate", "gate and value: 768 to 2432,\nback to 768\nor a mixture of experts", "06 08 09"),
    ):
        arrow((stream, y), (4.35, y), look="norm")
        box(4.95, y, 1.2, 0.6, "norm", "norm", "01")
        arrow((5.55, y), (6.3, y), look=look)
        box(7.85, y + 0.55, 3.1, 1.65, "", look, numbers)
        axes.text(7.85, y + 0.0, part, ha="center", va="center", fontweight="bold", zorder=5)
        axes.text(7.85, y + 0.8, inside, ha="center", va="center", fontsize=10, zorder=5, linespacing=1.35)
        arrow((7.85, y + 1.37), (7.85, y + 1.8), (stream + 0.2, y + 1.8), look=look)
        axes.plot(
            stream, y + 1.8, "o", markersize=17, color="white", markeredgecolor=style.INK, markeredgewidth=1.8, zorder=4
        )
        axes.text(stream, y + 1.8, "+", ha="center", va="center", fontsize=14, fontweight="bold", zorder=5)
        shape(y + 1.8, "[4, 340, 768]")
        axes.text(
            (stream + 7.85) / 2,
            y + 1.72,
            "added to the stream",
            ha="center",
            va="bottom",
            fontsize=10,
            color=style.QUIET,
        )
    axes.text(stream + 0.15, 2.57, "a copy", fontsize=10, va="bottom", color=style.QUIET)
    axes.text(stream + 0.15, 5.12, "a copy", fontsize=10, va="bottom", color=style.QUIET)

    box(stream, 7.9, 2.9, 0.55, "norm", "norm", "01")
    shape(8.4, "[4, 340, 768]")
    box(stream, 8.9, 2.9, 0.55, "head", "up", "10")
    shape(9.45, "[4, 340, 6400]")
    arrow((stream, 9.45), (stream + 2.4, 9.45))
    box(6.45, 9.45, 2.3, 0.55, "loss", "highlight", "11")
    axes.text(right, 9.45, "one number", ha="right", va="center", color=style.QUIET)
    axes.text(stream, 10.05, "logits: one score per token of the vocabulary", ha="center", va="top", fontsize=10)
    tied = [(stream - 1.45, 1.25), (0.1, 1.25), (0.1, 8.9), (stream - 1.45, 8.9)]
    axes.plot(*zip(*tied, strict=True), color=style.color("up"), linestyle=":", linewidth=2)
    axes.text(0.3, 7.75, "one matrix,\nused twice", va="center", fontsize=10, color=style.color("up"))
    axes.text(right, 7.9, "the whole model: 12\ntraining: 14   generation: 15", ha="right", va="center", fontsize=10)
