"""Exercises of notebook 06: silu, the gated feed-forward, its width, and the slope of silu by hand."""

import math

import torch
import torch.nn.functional as F

from .framework import Exercise, case, draw

HALF, BRAIN = torch.float16, torch.bfloat16


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# 1. silu -------------------------------------------------------------------------------------------------------------


def silu_reference(x):
    """x * sigmoid(x), float32 inside. x: any shape and type."""
    return F.silu(x)


silu = Exercise(
    name="06_swiglu.silu",
    title="silu: x times its own sigmoid",
    signature="silu(x)",
    reference=silu_reference,
    cases=[
        case("two numbers", tensor(1.0, -1.0)),
        case("around the minimum", tensor(-1.0, -1.27846, -1.5, 0.0)),
        case("far out, where exp(x) overflows", tensor(-200.0, -90.0, 90.0, 200.0)),
        case("batch, seq, intermediate", draw(2, 3, 4, seed=601, scale=3.0)),
        case("bfloat16, three numbers", tensor(-2.25, -1.25, 2.75, dtype=BRAIN)),
        case("float16, far out", tensor(-60000, 60000, dtype=HALF)),
        case("float16", draw(8, 32, seed=602, scale=3.0, dtype=HALF)),
        case("bfloat16", draw(8, 32, seed=603, scale=3.0, dtype=BRAIN)),
    ],
)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype == torch.float64 else x.float()


@silu.mutant(
    "that is the sigmoid alone",
    "the sigmoid lies between 0 and 1; silu is x times it, and grows without end.",
    "the first gated unit (GLU, 2016) has the sigmoid as its activation.",
)
def only_sigmoid(x):
    return torch.sigmoid(wide(x)).to(x.dtype)


@silu.mutant(
    "the sigmoid has the wrong sign: x * sigmoid(-x)",
    "large inputs would be pressed to 0 and negative ones would pass.",
)
def sign_turned(x):
    return (wide(x) * torch.sigmoid(-wide(x))).to(x.dtype)


@silu.mutant(
    "negative results are set to 0",
    "silu falls to -0.278 before it rises to 0. That dip is part of the function the weights were trained with.",
)
def clamped(x):
    return F.silu(x).clamp(min=0)


@silu.mutant(
    "that is ReLU",
    "ReLU has no slope at all below 0, and a corner at 0; silu is smooth.",
    "hidden_act = 'relu' makes the feed-forward a ReGLU.",
)
def relu(x):
    return F.relu(x)


@silu.mutant(
    "that is GELU: x times the normal distribution, not x times the sigmoid",
    "the curves look alike, but GELU's dip is -0.170 and silu's -0.278.",
    "hidden_act = 'gelu' makes the feed-forward a GEGLU.",
)
def gelu(x):
    return F.gelu(x)


@silu.mutant(
    "the sigmoid is taken of 1.702 x",
    "that factor makes silu look like GELU; silu itself has the factor 1.",
    "CLIP's QuickGELU.",
)
def quick_gelu(x):
    return (wide(x) * torch.sigmoid(1.702 * wide(x))).to(x.dtype)


@silu.mutant(
    "the sigmoid is added, not multiplied",
    "at -1 the sum is -0.731, the product -0.269. A gate multiplies.",
)
def sigmoid_added(x):
    return (wide(x) + torch.sigmoid(wide(x))).to(x.dtype)


@silu.mutant(
    "tanh stands where the sigmoid belongs",
    "tanh runs from -1 to 1, so x * tanh(x) is positive on both sides: negative inputs pass as if they were positive.",
)
def tanh_for_sigmoid(x):
    return (wide(x) * torch.tanh(wide(x))).to(x.dtype)


@silu.mutant(
    "that is softplus, log(1 + exp(x))",
    "softplus is never negative and is 0.693 at 0. Its slope is the sigmoid; silu is x times the sigmoid.",
)
def softplus(x):
    return F.softplus(wide(x)).to(x.dtype)


@silu.mutant(
    "the sigmoid is written as exp(x) / (1 + exp(x)), which overflows",
    "for large x both are infinite, and infinity / infinity is NaN. 1 / (1 + exp(-x)) and torch.sigmoid are safe.",
)
def overflow(x):
    grown = wide(x).exp()
    return (wide(x) * grown / (1 + grown)).to(x.dtype)


@silu.mutant(
    "the arithmetic stays in half precision",
    "the sigmoid is rounded, then the product once more. Go to float32 first and cast once, as in 01.",
)
def half_arithmetic(x):
    return x * torch.sigmoid(x)


@silu.mutant(
    "the result is not cast back to the type of x",
    "from here on the whole model would run in float32, at twice the memory. End with .to(x.dtype).",
)
def not_cast_back(x):
    return F.silu(wide(x))


# 2. swiglu -----------------------------------------------------------------------------------------------------------


def swiglu_reference(x, gate_weight, up_weight, down_weight):
    """down(silu(gate(x)) * up(x)). x: [..., hidden]; gate, up: [intermediate, hidden]; down: [hidden, intermediate]."""
    return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


def swiglu_case(label: str, *axes: int, intermediate: int, seed: int, scale: float = 1.0):
    hidden = axes[-1]
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    x, weights = draw(*axes, seed=seed, scale=scale), [draw(*s, seed=seed + 1 + i) for i, s in enumerate(shapes)]
    return case(label, x, *weights)


swiglu = Exercise(
    name="06_swiglu.swiglu",
    title="SwiGLU: two branches, one product, and back",
    signature="swiglu(x, gate_weight, up_weight, down_weight)",
    reference=swiglu_reference,
    provides={"silu": silu_reference},
    cases=[
        case("one number, gate 1, up 2, down 1", tensor(1.0), *(tensor(v)[None] for v in (1.0, 2.0, 1.0))),
        case("the same with -1", tensor(-1.0), *(tensor(v)[None] for v in (1.0, 2.0, 1.0))),
        swiglu_case("two features, width 2", 2, intermediate=2, seed=610),
        swiglu_case("one token of three features, width 5", 1, 3, intermediate=5, seed=614),
        swiglu_case("batch, seq, hidden", 2, 3, 4, intermediate=6, seed=618),
        swiglu_case("large numbers", 2, 4, intermediate=6, seed=622, scale=30.0),
    ],
)


def branches(x, gate_weight, up_weight):
    return F.linear(x, gate_weight), F.linear(x, up_weight)


@swiglu.mutant(
    "gate and up are exchanged: the activation is on the up branch",
    "silu(1) * 2 = 1.462, but silu(2) * 1 = 1.762. Trained weights know which branch is the gate.",
)
def exchanged(x, gate_weight, up_weight, down_weight):
    return swiglu_reference(x, up_weight, gate_weight, down_weight)


@swiglu.mutant(
    "the activation is taken of the product: silu(gate * up)",
    "only the gate passes through silu. Of the product, a negative gate times a negative up would pass in full.",
)
def activation_of_product(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.linear(F.silu(gate * up), down_weight)


@swiglu.mutant(
    "the branches are added, not multiplied",
    "a sum can't close: the gate must be a factor, so that 0 stops the value.",
)
def added(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.linear(F.silu(gate) + up, down_weight)


@swiglu.mutant(
    "both branches pass through silu",
    "up is the value: it must be free to be as negative as it likes.",
)
def both_activated(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.linear(F.silu(gate) * F.silu(up), down_weight)


@swiglu.mutant(
    "the gate is a sigmoid, not silu",
    "the sigmoid stays below 1; silu is gate * sigmoid(gate), and grows with the gate.",
    "this is GLU, the first of the family (Dauphin and others, 2016).",
)
def sigmoid_gate(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.linear(torch.sigmoid(gate) * up, down_weight)


@swiglu.mutant(
    "the activation is GELU",
    "MiniMind's hidden_act is 'silu'. The two differ by up to 0.2, at every feature of every layer.",
    "GEGLU, used by T5 1.1 and Gemma.",
)
def gelu_gate(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.linear(F.gelu(gate) * up, down_weight)


@swiglu.mutant(
    "the activation is ReLU",
    "every feature with a negative gate is then exactly 0. MiniMind's hidden_act is 'silu'.",
    "ReGLU, from the same paper as SwiGLU.",
)
def relu_gate(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.linear(F.relu(gate) * up, down_weight)


@swiglu.mutant(
    "there is no activation: gate * up",
    "the product alone is symmetric: -x gives the same result as x. The gate should close on one side.",
    "the Bilinear layer of the same paper.",
)
def bilinear(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.linear(gate * up, down_weight)


@swiglu.mutant(
    "the up branch is not used",
    "silu(gate) without a value to gate is the plain feed-forward, with one matrix idle.",
    "the feed-forward of 2017 has no gate: activation(x W1) W2.",
)
def no_up(x, gate_weight, up_weight, down_weight):
    return F.linear(F.silu(F.linear(x, gate_weight)), down_weight)


@swiglu.mutant(
    "the activation comes last, after down",
    "the result is added to the stream and must be free to lower it; silu would cut it at -0.278.",
)
def activation_last(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.silu(F.linear(gate * up, down_weight))


@swiglu.mutant(
    "down is missing: the product was returned as it is",
    "the stream is hidden wide, the product intermediate wide: they can't be added.",
)
def no_down(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return F.silu(gate) * up


@swiglu.mutant(
    "the weights are not transposed: x @ weight",
    "PyTorch keeps a weight as [out, in], so it is x @ weight.T, or F.linear(x, weight). With square weights nothing "
    "stops you, and the numbers are wrong.",
)
def not_transposed(x, gate_weight, up_weight, down_weight):
    return (F.silu(x @ gate_weight) * (x @ up_weight)) @ down_weight


@swiglu.mutant(
    "down is not transposed: the product times down_weight",
    "down_weight is [out, in] as well, so it is product @ down_weight.T. Only where width and hidden are equal does it "
    "run without .T, and then the numbers are wrong.",
)
def down_not_transposed(x, gate_weight, up_weight, down_weight):
    gate, up = branches(x, gate_weight, up_weight)
    return (F.silu(gate) * up) @ down_weight


@swiglu.mutant(
    "both branches are made with gate_weight: silu(gate) * gate",
    "the gate says how much, up says of what: the value has a matrix of its own.",
)
def one_weight(x, gate_weight, up_weight, down_weight):
    return swiglu_reference(x, gate_weight, gate_weight, down_weight)


@swiglu.mutant(
    "x is added to the result",
    "the block around the feed-forward adds x, so it would be added twice.",
)
def input_added(x, gate_weight, up_weight, down_weight):
    return x + swiglu_reference(x, gate_weight, up_weight, down_weight)


@swiglu.mutant(
    "x itself is gated: silu(gate) * x",
    "the value has a matrix of its own, up: what is gated is up(x). This runs only where width and hidden are equal.",
)
def x_is_the_value(x, gate_weight, up_weight, down_weight):
    return F.linear(F.silu(F.linear(x, gate_weight)) * x, down_weight)


# 3. intermediate_size ------------------------------------------------------------------------------------------------


def intermediate_reference(hidden):
    """The least multiple of 64 that is not below pi * hidden."""
    return math.ceil(hidden * math.pi / 64) * 64


width = Exercise(
    name="06_swiglu.intermediate_size",
    title="The width inside: pi times hidden, up to a multiple of 64",
    signature="intermediate_size(hidden)",
    reference=intermediate_reference,
    cases=[
        case("MiniMind-3", 768),
        case("hidden 64", 64),
        case("hidden 512", 512),
        case("hidden 100", 100),
        case("hidden 326, where pi * hidden is 1024.16", 326),
        case("hidden 387, where pi * hidden is 1215.80", 387),
        case("hidden 1", 1),
        case("hidden 4096", 4096),
    ],
)


def up_to(value: float, step: int) -> int:
    return math.ceil(value / step) * step


@width.mutant(
    "the width is rounded down to a multiple of 64",
    "math.ceil rounds up. For 768 that is 2432, not 2368.",
)
def rounded_down(hidden):
    return int(hidden * math.pi) // 64 * 64


@width.mutant(
    "the width is rounded to the nearest multiple of 64",
    "the rule rounds up, always: the width is never below pi * hidden.",
)
def rounded_to_nearest(hidden):
    return round(hidden * math.pi / 64) * 64


@width.mutant(
    "the factor is 8/3, not pi",
    "a checkpoint with width 2432 does not fit into a model with width 2048.",
    "MiniMind-2 and Llama: with 8/3 three matrices cost as much as two of width 4 * hidden.",
)
def eight_thirds(hidden):
    return up_to(int(hidden * 8 / 3), 64)


@width.mutant(
    "the width is 4 * hidden",
    "three matrices of that width cost 1.5 times the two that the 4 was meant for.",
    "the Transformer of 2017 and GPT-2, both without a gate.",
)
def four_times(hidden):
    return 4 * hidden


@width.mutant(
    "the width is not rounded to a multiple of 64",
    "matrix units work on tiles: 2413 columns leave the last tile partly empty.",
)
def not_aligned(hidden):
    return math.ceil(hidden * math.pi)


@width.mutant(
    "pi * hidden is not rounded at all",
    "2412.7 columns don't exist. The width is a whole number of tiles of 64.",
)
def not_rounded(hidden):
    return hidden * math.pi


@width.mutant(
    "pi * hidden is rounded up and then multiplied by 64, without the division by 64",
    "64 belongs in twice: divide by it to count the tiles, round up, and multiply by it again.",
)
def not_divided(hidden):
    return math.ceil(hidden * math.pi) * 64


@width.mutant(
    "the width is rounded to a multiple of 256",
    "MiniMind's step is 64.",
    "the first Llama's multiple_of is 256.",
)
def aligned_to_256(hidden):
    return up_to(hidden * math.pi, 256)


@width.mutant(
    "the width is rounded to a multiple of 128",
    "MiniMind's step is 64. For 768 both give 2432; for 100 it is 320 against 384.",
)
def aligned_to_128(hidden):
    return up_to(hidden * math.pi, 128)


@width.mutant(
    "hidden was rounded up to 64 before the product with pi",
    "rounding comes last: pi times a multiple of 64 is no multiple of 64.",
)
def rounded_first(hidden):
    return int(up_to(hidden, 64) * math.pi)


@width.mutant(
    "pi was rounded to 3",
    "then 768 gives 2304. The factor is math.pi.",
)
def pi_is_three(hidden):
    return up_to(3 * hidden, 64)


@width.mutant(
    "pi was rounded to 3.14",
    "for 326 the product is then 1023.64, not 1024.16, and one tile is missing. math.pi has all the digits.",
)
def pi_is_short(hidden):
    return up_to(3.14 * hidden, 64)


@width.mutant(
    "pi was rounded to 22/7",
    "for 387 the product is then 1216.29, not 1215.80, and there is one tile too many. math.pi has all the digits.",
)
def pi_is_a_fraction(hidden):
    return up_to(hidden * 22 / 7, 64)


@width.mutant(
    "pi was rounded up to 4 before the product",
    "math.ceil belongs around hidden * math.pi / 64, not around pi.",
)
def pi_is_four(hidden):
    return up_to(math.ceil(math.pi) * hidden, 64)


@width.mutant(
    "the fraction of pi * hidden was cut off before rounding up",
    "1024.16 becomes 1024, which needs no rounding up. Divide first, then one math.ceil.",
)
def cut_off_first(hidden):
    return (int(hidden * math.pi) + 63) // 64 * 64


@width.mutant(
    "the multiplication by 64 at the end is missing",
    "that is the number of tiles; the width is 64 times it.",
)
def tiles(hidden):
    return math.ceil(hidden * math.pi / 64)


# 4. silu_slope -------------------------------------------------------------------------------------------------------


def slope_reference(x):
    """The derivative of silu. x: any shape."""
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


slope = Exercise(
    name="06_swiglu.silu_slope",
    title="The slope of silu by hand, without autograd",
    signature="silu_slope(x)",
    reference=slope_reference,
    provides={"silu": silu_reference},
    cases=[
        case("0 and 1", tensor(0.0, 1.0)),
        case("both sides of the minimum", tensor(-1.0, -1.27846, -1.5, -5.0)),
        case("far out", tensor(-90.0, 90.0)),
        case("two rows of four", draw(2, 4, seed=630, scale=2.0)),
    ],
)


@slope.mutant(
    "that is the slope of the sigmoid, s (1 - s)",
    "silu is a product, x times s: it has two factors that change.",
)
def sigmoid_slope(x):
    s = torch.sigmoid(x)
    return s * (1 - s)


@slope.mutant(
    "only s: x changes, but the sigmoid was taken for a constant",
    "the sigmoid depends on x as well. Its slope, s (1 - s), times x is the missing part.",
)
def gate_as_constant(x):
    return torch.sigmoid(x)


@slope.mutant(
    "only x s (1 - s): the sigmoid changes, but x was taken for a constant",
    "the product rule has two parts; the other one is s.",
)
def value_as_constant(x):
    s = torch.sigmoid(x)
    return x * s * (1 - s)


@slope.mutant(
    "the second part is subtracted, not added",
    "the product rule adds: s + x s (1 - s). With a minus the slope goes below 0 on the right, where silu rises.",
)
def subtracted(x):
    s = torch.sigmoid(x)
    return s * (1 - x * (1 - s))


@slope.mutant(
    "the slope of the sigmoid was written as 1 - s, without the factor s",
    "far on the left 1 - s is 1, and the slope would fall without end. It is s (1 - s).",
)
def factor_forgotten(x):
    s = torch.sigmoid(x)
    return s + x * (1 - s)


@slope.mutant(
    "the slope of the sigmoid was written as s * s",
    "it is s (1 - s): steepest at 0, flat on both sides.",
)
def squared(x):
    s = torch.sigmoid(x)
    return s + x * s * s


@slope.mutant(
    "the factor s in front of 1 + x (1 - s) is missing",
    "far on the left the slope would be about x. Both parts of the product rule hold an s.",
)
def outer_factor_forgotten(x):
    return 1 + x * (1 - torch.sigmoid(x))


@slope.mutant(
    "the factor 1 - s is missing",
    "s + x s grows without end; far on the right the slope of silu is 1.",
)
def no_complement(x):
    s = torch.sigmoid(x)
    return s + x * s


@slope.mutant(
    "the factor x of the second part is missing: s + s (1 - s)",
    "the product rule is u' v + u v'. In the second part u = x stays as it is.",
)
def value_forgotten(x):
    s = torch.sigmoid(x)
    return s + s * (1 - s)


@slope.mutant(
    "the first part is 1, without the factor s",
    "the product rule is u' v + u v'. u' is 1, but v = s stays as it is.",
)
def first_part_is_one(x):
    s = torch.sigmoid(x)
    return 1 + x * s * (1 - s)


@slope.mutant(
    "the sigmoid is written as exp(x) / (1 + exp(x)), which overflows",
    "for large x both are infinite, and infinity / infinity is NaN. 1 / (1 + exp(-x)) and torch.sigmoid are safe.",
)
def overflow_in_slope(x):
    grown = x.exp()
    s = grown / (1 + grown)
    return s * (1 + x * (1 - s))


@slope.mutant(
    "that is silu itself",
    "wanted is how fast it rises: 0.5 at 0, where silu is 0.",
)
def silu_itself(x):
    return F.silu(x)


@slope.mutant(
    "negative slopes are set to 0",
    "left of -1.278 silu falls: there the slope is below 0.",
)
def never_falling(x):
    return slope_reference(x).clamp(min=0)


@slope.mutant(
    "that is the slope of ReLU, 0 or 1",
    "silu is smooth: its slope passes 0.5 at 0 and goes as high as 1.1.",
)
def step(x):
    return (x > 0).to(x.dtype)


EXERCISES = [silu, swiglu, width, slope]
