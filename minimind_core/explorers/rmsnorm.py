"""Explorer of notebook 01."""
import numpy as np, torch
from . import style
from .shell import Choice, Explorer, Result, Slider, linear, log, powers
from ..normalization import rms_norm
CONTROLS = {
  "shift": Slider("shift", linear(0, 4, 0.25), 0.0),
  "eps": Slider("eps", log(1e-8, 1e-2), 1e-6),
  "dtype": Choice("dtype", ("float32","bfloat16"), "float32"),
}
def compute(shift, eps, dtype):
    x = torch.linspace(-1,1,16)+shift
    return Result({"x": x.numpy(), "y": rms_norm(x, torch.ones(16), eps).numpy()}, f"shift {shift} eps {eps:.3g} dtype {dtype}.")
def draw(figure):
    a, b = figure.subplots(1,2)
    a.set(xlim=(-1,16), ylim=(-2,6), title="before"); b.set(xlim=(-1,16), ylim=(-3,3), title="after")
    return {"x": a.plot(range(16), np.zeros(16), **style.points("before")), "y": b.plot(range(16), np.zeros(16), **style.points("after"))}
def update(scene, result):
    scene["x"][0].set_ydata(result.numbers["x"]); scene["y"][0].set_ydata(result.numbers["y"])
def explore(**start):
    return Explorer("rmsnorm", controls=CONTROLS, compute=compute, draw=draw, update=update, presets={"MiniMind-2": {"eps": 1e-5}}, start=start)
