"""Explorer of notebook 01: what RMSNorm keeps, what eps decides, and where the arithmetic must be float32."""

import math

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn.functional import layer_norm

from ..normalization import rms_norm
from . import style
from .shell import Choice, Explorer, Result, Slider, linear, log, powers

SHOWN = 16  # features drawn
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS = {  # how the arithmetic may be done: name, meaning of its look
    "float32 inside, one cast": "after",
    "cast before the weight": "before",
    "all in the input's type": "wrong",
}
WORST = 10.0  # where a result that is not finite is drawn
SHIFTS = torch.linspace(0, 4, 33)
RMS = np.logspace(-7, 4, 200)

CONTROLS = {
    "shift": Slider("shift", linear(0, 4, 0.25), 0.0),
    "scale": Slider("scale", log(1e-6, 1e3), 1.0),
    "eps": Slider("eps", log(1e-8, 1e-2), 1e-6),
    "width": Slider("width", (*powers(4, 512), 768, *powers(1024, 4096)), 768, unit="features"),
    "dtype": Choice("dtype", tuple(DTYPES), "float32"),
}
PRESETS = {
    "MiniMind-3": {"eps": 1e-6},
    "MiniMind-2": {"eps": 1e-5},
    "tiny input": {"scale": 1e-4, "shift": 0.0, "dtype": "float32"},
    "shifted": {"scale": 1.0, "shift": 2.0, "dtype": "float32"},
    "bfloat16": {"scale": 1.0, "dtype": "bfloat16"},
    "large float16": {"scale": 1e3, "dtype": "float16"},
}
STILLS = {"tiny_input": PRESETS["tiny input"]}


def _inputs(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A normal vector and a weight near one, [width] each; always the same."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2, 4096, generator=generator)[:, :width]
    return values[0], 1 + 0.3 * values[1]


def _all_in_type(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm with each step rounded to the type of x, as it should not be done."""
    mean_square = (x * x).mean(dim=-1, keepdim=True)
    return weight.to(x.dtype) * (x * torch.rsqrt(mean_square + eps))


def compute(shift: float, scale: float, eps: float, width: int, dtype: str) -> Result:
    """One vector of `width` features, scale * (normal + shift), through RMSNorm."""
    base, weight = _inputs(width)
    x = (scale * (base + shift)).to(DTYPES[dtype])
    exact, ones = x.double(), torch.ones(width)
    after = rms_norm(exact, ones, eps)
    rms_before, rms_after = (v.square().mean().sqrt().item() for v in (exact, after))

    many = scale * (base + SHIFTS[:, None])  # the same vector at every shift
    mean_rms = rms_norm(many, ones, eps).mean(dim=-1)
    mean_layer = layer_norm(many, (width,), eps=eps).mean(dim=-1)

    wanted = rms_norm(exact, weight.double(), eps)
    results = (
        rms_norm(x, weight, eps),
        rms_norm(x, weight, eps, cast="before_weight"),
        _all_in_type(x, weight, eps),
    )
    unit = wanted.square().mean().sqrt().item()
    worst = [((result.double() - wanted).abs().max() / unit).item() for result in results]
    finite = [math.isfinite(error) for error in worst]
    errors = [min(error, WORST) if ok else WORST for error, ok in zip(worst, finite, strict=True)]

    words = f"The rms is {rms_before:.3g} before and {rms_after:.3g} after"
    if rms_after < 0.99:
        words += f": eps = {eps:.3g} counts beside a mean square of {rms_before**2:.2g}"
    mean = round(after.mean().item(), 2) + 0.0  # no -0.0
    words += f". The mean after is {mean:.2f}; LayerNorm would make it 0. "
    if dtype == "float32":  # a bound: last digits differ between machines
        words += (
            f"In float32 the largest error is below 1e{math.floor(math.log10(max(errors))) + 1}, in any order of steps."
        )
    else:
        every = f"{errors[2]:.1e}" if finite[2] else "no longer finite"
        words += f"In {dtype} the largest error is {errors[0]:.1e}; with every step in {dtype} it is {every}."
    numbers = {
        "unit": scale,
        "eps": eps,
        "before": (exact / scale)[:SHOWN].numpy(),
        "after": after[:SHOWN].numpy(),
        "rms": (rms_before, rms_after),
        "gain": RMS / np.sqrt(RMS**2 + eps),
        "shift": shift,
        "mean_rms": mean_rms.numpy(),
        "mean_layer": mean_layer.numpy(),
        "mean": after.mean().item(),
        "errors": errors,
        "finite": [float(ok) for ok in finite],
    }
    return Result(numbers, words)


def draw(figure: Figure) -> dict:
    """Four panels: values, rms out against rms in, mean against shift, errors. Returns what moves."""
    (values, curve), (means, errors) = figure.subplots(2, 2)
    scene = {}

    values.set(title="The first 16 values", xlim=(-0.8, SHOWN - 0.2), ylim=(-4, 11), xlabel="feature")
    values.axhline(0, color=style.QUIET, linewidth=1)
    (scene["before"],) = values.plot([], [], **style.points("before"), markerfacecolor="white", markersize=11)
    (scene["after"],) = values.plot([], [], **style.points("after"))
    scene["unit"] = values.text(0.02, 0.97, "", va="top", transform=values.transAxes, color=style.color("before"))
    values.text(0.02, 0.82, "◆ after", va="top", transform=values.transAxes, color=style.color("after"))

    curve.set(title="eps sets where it stops working", xscale="log", yscale="log")
    curve.set(xlim=(1e-7, 1e4), ylim=(1e-5, 30), xlabel="rms before", ylabel="rms after")
    curve.axhline(1, **style.line("reference"), linewidth=1)
    (scene["gain"],) = curve.plot([], [], **style.line("norm"))
    (scene["knee"],) = curve.plot([], [], color=style.QUIET, linewidth=1)
    scene["knee_label"] = curve.text(0, 2e-5, "", color=style.QUIET)
    (scene["here"],) = curve.plot([], [], **style.points("highlight"), markersize=13)

    means.set(title="A shift stays in", xlim=(-0.1, 4.1), ylim=(-0.25, 1.2), xlabel="shift", ylabel="mean after")
    (scene["mean_rms"],) = means.plot([], [], **style.line("norm"))
    (scene["mean_layer"],) = means.plot([], [], **style.line("before"))
    scene["rms_label"] = style.label(means, 4.05, 0, "RMSNorm", "norm", ha="right", va="bottom")
    style.label(means, 4.05, 0.06, "LayerNorm", "before", ha="right", va="bottom")
    (scene["shift_here"],) = means.plot([], [], **style.points("highlight"), markersize=13)

    errors.set(title="Largest error / rms", xscale="log", xlim=(1e-8, 30), ylim=(-0.4, 2.8), yticks=[])
    errors.set_xticks([1e-8, 1e-6, 1e-4, 1e-2, 1])
    scene["errors"], scene["tails"] = [], []
    for row, (name, meaning) in enumerate(reversed(WAYS.items())):
        color = style.color(meaning)
        errors.text(1.4e-8, row + 0.22, name, color=color, va="bottom")
        scene["tails"] += errors.plot([1e-8, 1e-8], [row, row], color=color, linewidth=3)
        scene["errors"] += errors.plot([], [], **style.points(meaning), markersize=8)
    return scene


def update(scene: dict, result: Result) -> None:
    """Move everything that `draw` returned."""
    numbers = result.numbers
    scene["before"].set_data(range(len(numbers["before"])), numbers["before"])
    scene["after"].set_data(range(len(numbers["after"])), numbers["after"])
    unit = numbers["unit"]
    scene["unit"].set_text("○ before" if unit == 1 else f"○ before, in units of {unit:.3g}")

    scene["gain"].set_data(RMS, numbers["gain"])
    knee = math.sqrt(numbers["eps"])
    scene["knee"].set_data([knee, knee], [1e-5, 1 / math.sqrt(2)])
    scene["knee_label"].set(text=f" √eps = {knee:.2g}", x=knee)
    scene["here"].set_data([numbers["rms"][0]], [numbers["rms"][1]])

    scene["mean_rms"].set_data(SHIFTS.numpy(), numbers["mean_rms"])
    scene["mean_layer"].set_data(SHIFTS.numpy(), numbers["mean_layer"])
    scene["rms_label"].set_y(numbers["mean_rms"][-1] + 0.04 if numbers["mean_rms"][-1] > 0.3 else 0.3)
    scene["shift_here"].set_data([numbers["shift"]], [numbers["mean"]])

    for row, error in enumerate(reversed(numbers["errors"])):
        at = max(error, 1e-8)
        scene["tails"][row].set_xdata([1e-8, at])
        scene["errors"][row].set_data([at], [row])


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with: shift, scale, eps, width, dtype."""
    return Explorer(
        "rmsnorm",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=(style.WIDTH, 4.5),
        start=start,
    )
