"""Explorer of notebook 06: one feature of a gated feed-forward over a plane of inputs, and what a width costs."""

import math

import numpy as np
import torch
from matplotlib.colors import AsinhNorm
from matplotlib.figure import Figure

from ..config import ACTIVATIONS
from . import style
from .shell import Choice, Explorer, Result, Slider, linear

REACH = 3  # the plane runs from -REACH to REACH in both features
PLANE = (np.arange(96) - 47.5) * REACH / 48  # middles of its cells
SIGNS = slice(6, None, 12)  # every twelfth cell carries the sign of its value
STEPS = np.linspace(-REACH, REACH, 121)  # places on the line
SHOWN = 30.0  # values beyond are drawn as dark as this one
NOTHING = 0.01  # a value below this counts as 0
FUNCTIONS = ACTIVATIONS | {"sigmoid": torch.sigmoid, "none": lambda x: x}
GATED, EXCHANGED, PLAIN = FORMS = ("act(gate) * up", "gate * act(up)", "act(gate)")

WEIGHTS = linear(-2, 2, 0.25)
CONTROLS = {
    "activation": Choice("activation", tuple(FUNCTIONS), "silu"),
    "form": Choice("feature", FORMS, GATED),
    "gate_1": Slider("gate weight 1", WEIGHTS, 1.0),
    "gate_2": Slider("gate weight 2", WEIGHTS, 0.0),
    "up_1": Slider("up weight 1", WEIGHTS, 0.5),
    "up_2": Slider("up weight 2", WEIGHTS, 1.0),
    "angle": Slider("angle of the line", range(-165, 181, 15), 45, unit="degrees"),
    "hidden": Slider("hidden size", range(64, 2049, 64), 768),
}
PRESETS = {
    "SwiGLU": {"activation": "silu", "form": GATED},
    "ReGLU": {"activation": "relu", "form": GATED},
    "GEGLU": {"activation": "gelu", "form": GATED},
    "plain ReLU": {"activation": "relu", "form": PLAIN},
    "gate and up exchanged": {"activation": "silu", "form": EXCHANGED},
}
STILLS = {"exchanged": PRESETS["gate and up exchanged"], "plain_relu": PRESETS["plain ReLU"]}


def _aligned(width: int) -> int:
    return 64 * math.ceil(width / 64)


def _budget(hidden: int) -> list[tuple[str, int, int]]:
    """(rule, width, parameters) of four feed-forwards of one hidden size, without biases."""
    widths = [
        ("4h plain", 4 * hidden, 2),
        ("4h gated", 4 * hidden, 3),
        ("8/3 gated", _aligned(int(hidden * 8 / 3)), 3),
        ("π gated", _aligned(math.ceil(hidden * math.pi)), 3),
    ]
    return [(name, width, matrices * width * hidden) for name, width, matrices in widths]


def _feature(gate: np.ndarray, up: np.ndarray, activation: str, form: str) -> tuple[np.ndarray, ...]:
    """The two factors and their product, all of one shape."""

    def act(x: np.ndarray) -> np.ndarray:
        return FUNCTIONS[activation](torch.from_numpy(x)).numpy()

    if form == PLAIN:
        gate, up = act(gate), np.ones_like(up)
    elif form == EXCHANGED:
        up = act(up)
    else:
        gate = act(gate)
    return gate, up, gate * up


def _labels(activation: str, form: str) -> tuple[str, str]:
    """What the two curves are: each branch as it enters the product."""
    bent = "{}" if activation == "none" else f"{activation}({{}})"
    return ("gate", bent.format("up")) if form == EXCHANGED else (bent.format("gate"), "up")


def compute(
    activation: str, form: str, gate_1: float, gate_2: float, up_1: float, up_2: float, angle: int, hidden: int
) -> Result:
    """The feature over the plane and along a line through its middle; and the parameters of four widths."""
    columns, rows = PLANE[None, :], PLANE[:, None]
    gate, up = gate_1 * columns + gate_2 * rows, up_1 * columns + up_2 * rows
    surface = _feature(gate, up, activation, form)[-1]
    east, north = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    on_line = (gate_1 * east + gate_2 * north) * STEPS, (up_1 * east + up_2 * north) * STEPS
    gate_part, up_part, product = _feature(*on_line, activation, form)

    negative, nothing = (surface < -NOTHING).mean(), (np.abs(surface) <= NOTHING).mean()
    marked = product[80], product[100]  # at t = 1 and t = 2
    low, high, one, two = (round(float(value), 2) + 0.0 for value in (surface.min(), surface.max(), *marked))  # no -0.0
    budget = _budget(hidden)
    name = form.replace("act", activation)
    if activation == "none":
        name = form.replace("act(", "").replace(")", "")
    grows = f" ({marked[1] / marked[0]:.1f} times)" if abs(one) > NOTHING else ""
    words = (
        f"{name} runs from {low:.2f} to {high:.2f} here: below 0 on {100 * negative:.0f} % of the "
        f"square, 0 on {100 * nothing:.0f} %. On the line it goes from {one:.2f} at t = 1 to {two:.2f} at t = 2"
        f"{grows}. Hidden size {hidden}: the π rule gives width {budget[3][1]}, "
        f"{budget[3][2] / budget[0][2]:.2f} times the parameters of 4h without gate."
    )
    numbers = {
        "surface": surface,
        "gate": (gate_1, gate_2),
        "up": (up_1, up_2),
        "activation": list(FUNCTIONS).index(activation),
        "form": FORMS.index(form),
        "direction": (east, north),
        "gate_part": gate_part,
        "up_part": up_part,
        "product": product,
        "marked": marked,
        "negative": negative,
        "nothing": nothing,
        "widths": [width for _, width, _ in budget],
        "parameters": [count for _, _, count in budget],
        "hidden": hidden,
    }
    return Result(numbers, words)


def draw(figure: Figure) -> dict:
    """Three panels: the plane, the line through it, the parameters. Returns what moves."""
    grid = figure.add_gridspec(2, 2, width_ratios=(1.32, 1), height_ratios=(1.3, 1))
    plane, line, bars = (figure.add_subplot(grid[place]) for place in ((slice(None), 0), (0, 1), (1, 1)))
    scene = {}

    plane.set(title="The feature, for every input", xlabel="x₁", ylabel="x₂", aspect="equal")
    plane.grid(False)
    norm = AsinhNorm(linear_width=0.25, vmin=-SHOWN, vmax=SHOWN)
    edges = (-REACH, REACH, -REACH, REACH)
    scene["surface"] = image = plane.imshow(
        np.zeros((96, 96)), cmap=style.DIVERGING, norm=norm, origin="lower", extent=edges
    )
    ticks = [-10, -1, 0, 1, 10]
    bar = figure.colorbar(image, ax=plane, location="bottom", ticks=ticks, shrink=0.92, aspect=32, pad=0.015)
    bar.ax.set_xticklabels([f"{tick}".replace("-", "−") for tick in ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)
    scene["signs"] = [
        plane.plot(
            [], [], color=style.INK, linestyle="none", marker=f"${sign}$", markersize=7, markeredgewidth=0, zorder=3
        )[0]
        for sign in "+-0"
    ]
    scene["line"] = plane.plot(
        [], [], color=style.INK, linewidth=1.5, marker="D", markevery=[1], markersize=6, clip_on=False
    )
    scene["ground"], scene["zero"], scene["arrow"], scene["tip"] = [], [], [], []
    for meaning, width in (("gate", 3.2), ("up", 1.9)):  # where the two meet, both are seen
        scene["ground"] += plane.plot([], [], color="white", linewidth=width + 2, alpha=0.8)
        scene["zero"] += plane.plot([], [], **style.line(meaning), linewidth=width)
    for meaning, width, size in (("gate", 3.2, 14), ("up", 1.9, 9)):
        scene["ground"] += plane.plot([], [], color="white", linewidth=width + 2, solid_capstyle="round")
        scene["arrow"] += plane.plot([], [], color=style.color(meaning), linewidth=width)
        scene["tip"] += plane.plot([], [], **style.points(meaning), markersize=size, markeredgecolor="white")
    scene["stars"] = plane.plot([], [], **style.points("highlight"), markersize=11, markeredgecolor="white")
    plane.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH))

    line.set(title="Along the black line", xlabel="t, place on the line (◆ at 3)")
    line.set(xlim=(-REACH, REACH), ylim=(-3, 7), xticks=range(-3, 4), yticks=range(-2, 7, 2))
    line.axhline(0, color=style.QUIET, linewidth=1)
    names = {"gate": "gate", "up": "up", "residual": "feature"}
    for row, (meaning, name) in enumerate(names.items()):
        width, order = (3, 2) if name == "feature" else (1.8, 2.1)  # a branch is seen where it equals the feature
        (scene[name],) = line.plot([], [], **style.line(meaning), linewidth=width, zorder=order)
        sample = line.plot([-2.85, -2.15], [6.4 - row, 6.4 - row], **style.line(meaning), linewidth=width)
        scene[f"{name}_label"] = [*sample, style.label(line, -2, 6.35 - row, name, meaning)]
    (scene["marks"],) = line.plot([], [], **style.points("highlight"), markersize=11)

    bars.set(title="Parameters, in units of h²", xlim=(0, 12.6), ylim=(3.6, -0.6), xticks=[0, 4, 8, 12])
    bars.set_yticks(range(4), [name for name, _, _ in _budget(768)])
    bars.tick_params(axis="y", length=0)
    bars.grid(False, axis="y")
    scene["bars"] = [
        bars.barh(row, 1, height=0.68, zorder=1.5, **(style.fill("gate" if row else "before", 0.2) | {"hatch": ""}))
        for row in range(4)
    ]
    bars.axvline(8, **style.line("reference"), linewidth=1.5)
    scene["bar_labels"] = [bars.text(0.25, row, "", va="center_baseline") for row in range(4)]
    return scene


def _zero_line(weight: tuple[float, float]) -> tuple[list[float], list[float]]:
    """Where weight . x = 0: a line through the middle, at right angles to the weight. Nowhere if the weight is 0."""
    length = math.hypot(*weight)
    if not length:
        return [], []
    far = 2 * REACH / length
    return [-weight[1] * far, weight[1] * far], [weight[0] * far, -weight[0] * far]


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers = result.numbers
    surface = numbers["surface"]
    scene["surface"].set_data(surface)
    few, at = surface[SIGNS, SIGNS], np.meshgrid(PLANE[SIGNS], PLANE[SIGNS])
    for artist, where in zip(scene["signs"], (few > NOTHING, few < -NOTHING, np.abs(few) <= NOTHING), strict=True):
        artist.set_data(at[0][where], at[1][where])
    form = FORMS[numbers["form"]]
    labels = _labels(list(FUNCTIONS)[numbers["activation"]], form)
    east, north = numbers["direction"]
    scene["line"][0].set_data([-REACH * east, REACH * east], [-REACH * north, REACH * north])
    for i, meaning in enumerate(("gate", "up")):
        weight, hidden = numbers[meaning], meaning == "up" and form == PLAIN
        zero = ([], []) if hidden else _zero_line(weight)
        arrow = ([], []) if hidden else ([0, weight[0]], [0, weight[1]])
        scene["ground"][i].set_data(*zero)
        scene["zero"][i].set_data(*zero)
        scene["ground"][2 + i].set_data(*arrow)
        scene["arrow"][i].set_data(*arrow)
        scene["tip"][i].set_data(arrow[0][1:], arrow[1][1:])
        scene[meaning].set_data(*(([], []) if hidden else (STEPS, numbers[f"{meaning}_part"])))
        scene[f"{meaning}_label"][1].set_text(labels[i])
        for artist in scene[f"{meaning}_label"]:
            artist.set_visible(not hidden)
    scene["feature"].set_data(STEPS, numbers["product"])
    scene["marks"].set_data([1, 2], numbers["marked"])
    scene["stars"][0].set_data([east, 2 * east], [north, 2 * north])

    for bar, label, width, count in zip(
        scene["bars"], scene["bar_labels"], numbers["widths"], numbers["parameters"], strict=True
    ):
        bar[0].set_width(count / numbers["hidden"] ** 2)
        label.set_text(f"{width}: {count / 1e6:.2f}M")


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with, named as in CONTROLS."""
    return Explorer(
        "swiglu",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.8),
        start=start,
    )
