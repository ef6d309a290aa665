"""One look for every picture of the series: fonts that a projector can carry, and one fixed color per meaning.

A meaning is never shown by color alone: each has its own marker, line style and hatch as well, and most lines carry
their name as a direct label. The colors come from the Okabe-Ito set, darkened until text in them is readable on white
(contrast at least 4.5 to 1), so a label may have the color of its line.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

WIDTH = 7.6  # inches; 760 pixels, the width of an output in JupyterLab with the file browser open
INK = "#222222"
QUIET = "#6b6b6b"
GRID = "#dddddd"


@dataclass(frozen=True)
class Look:
    """How one meaning is drawn."""

    color: str
    marker: str = "o"
    linestyle: str | tuple = "-"
    hatch: str = ""


LOOKS: dict[str, Look] = {
    # the three parts of attention; "query" and "key" are also the names of the two axes of a score table
    "query": Look("#0072B2", "o", "-", ""),
    "key": Look("#C04A00", "s", "--", "//"),
    "value": Look("#007A5A", "^", "-.", ".."),
    # the stream and what acts on it
    "residual": Look("#222222", "D", "-", ""),
    "norm": Look("#9B3F78", "v", (0, (5, 1)), "xx"),
    "gate": Look("#8A6100", "P", "-.", "\\\\"),
    "up": Look("#2478A8", "X", "--", "--"),
    # the two ends of a tied matrix: the marker points to the end of the model
    "embedding end": Look("#8A6100", "v", "--", "//"),
    "head end": Look("#9B3F78", "^", "-.", ".."),
    # comparisons
    "before": Look("#6b6b6b", "o", "--", ".."),
    "after": Look("#0072B2", "D", "-", ""),
    "reference": Look("#222222", "_", ":", "||"),
    "wrong": Look("#B3261E", "x", (0, (3, 1, 1, 1)), "xx"),
    "highlight": Look("#C04A00", "*", "-", ""),
    # experts
    "expert 0": Look("#0072B2", "o", "-", ""),
    "expert 1": Look("#C04A00", "s", "--", "//"),
    "expert 2": Look("#007A5A", "^", "-.", ".."),
    "expert 3": Look("#9B3F78", "v", ":", "xx"),
    "expert 4": Look("#8A6100", "P", (0, (5, 1)), "\\\\"),
    "expert 5": Look("#222222", "X", (0, (3, 1, 1, 1)), "--"),
    "expert 6": Look("#2478A8", "D", (0, (1, 1)), "||"),
    "expert 7": Look("#B3261E", "*", (0, (7, 2, 1, 2)), "++"),
}
LOOKS |= {"q": LOOKS["query"], "k": LOOKS["key"], "v": LOOKS["value"]}

HIGHLIGHT_FILL = "#FFE9A8"  # a pale background behind what matters; put text or a line on it as well
DIVERGING = "RdBu_r"  # color maps: signed values, centered on zero
SEQUENTIAL = "cividis"  # and values from none to much

RC = {
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titley": 1.0,  # a fixed height: matplotlib need not search for a free one at each drawing
    "axes.labelsize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "hatch.linewidth": 0.7,
    "image.cmap": SEQUENTIAL,
    "image.interpolation": "nearest",
    "figure.constrained_layout.use": True,
}


def color(meaning: str) -> str:
    """The color of a meaning, for example color("query")."""
    return look(meaning).color


def look(meaning: str) -> Look:
    """All of a meaning's look. Raises KeyError with the known names."""
    if meaning not in LOOKS:
        raise KeyError(f"no look for {meaning!r}; known meanings: {', '.join(LOOKS)}")
    return LOOKS[meaning]


def line(meaning: str, marker: bool = False) -> dict:
    """Keyword arguments for axes.plot: color and line style; with marker=True the marker too."""
    known = look(meaning)
    return {"color": known.color, "linestyle": known.linestyle} | ({"marker": known.marker} if marker else {})


def points(meaning: str) -> dict:
    """Keyword arguments for axes.plot that draw markers only."""
    known = look(meaning)
    return {"color": known.color, "marker": known.marker, "linestyle": "none"}


def fill(meaning: str, alpha: float = 0.35) -> dict:
    """Keyword arguments for axes.bar, axes.fill_between and patches: a pale face, an edge and a hatch."""
    known = look(meaning)
    face = (*matplotlib.colors.to_rgb(known.color), alpha)
    return {"facecolor": face, "edgecolor": known.color, "hatch": known.hatch, "linewidth": 1.2}


def use() -> None:
    """Give a notebook's own matplotlib plots the look of the series. Call it once, in the set-up cell."""
    matplotlib.rcParams.update(RC)


@contextmanager
def applied():
    """Draw inside this and the picture looks the same whatever the reader has set in matplotlib."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def figure(width: float = WIDTH, height: float = 3.4) -> Figure:
    """A figure of its own, in inches, which pyplot does not know (so it can't be left open). Use inside applied()."""
    return Figure(figsize=(width, height), dpi=RC["figure.dpi"], layout="constrained")


def label(axes: Axes, x: float, y: float, text: str, meaning: str, **options) -> Text:
    """Write text beside a line, in the line's color and on a white ground. x, y in data units."""
    options = {"va": "center", "ha": "left", "fontweight": "bold"} | options
    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    return axes.text(x, y, text, color=color(meaning), bbox=ground, clip_on=False, **options)


def limits(axes: Axes, x: tuple[float, float] | None = None, y: tuple[float, float] | None = None) -> None:
    """Set the limits of an axes only if they differ: moving limits makes the shell draw the whole figure again."""
    if x is not None and tuple(axes.get_xlim()) != tuple(x):
        axes.set_xlim(x)
    if y is not None and tuple(axes.get_ylim()) != tuple(y):
        axes.set_ylim(y)
