"""Exercises of notebook 01: RMSNorm, QK-norm, and the gradient of RMSNorm by hand."""

import torch

from ..normalization import rms_norm
from .framework import Exercise, case, draw

HALF, BRAIN = torch.float16, torch.bfloat16


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# 1. rms_norm ---------------------------------------------------------------------------------------------------------

rms = Exercise(
    name="01_rmsnorm.rms_norm",
    title="RMSNorm over the last axis, in float32, one cast at the end",
    signature="rms_norm(x, weight, eps)",
    reference=rms_norm,
    cases=[
        case("two numbers", tensor(3.0, 4.0), tensor(2.0, -0.5), 1e-6),
        case("two very small numbers, where eps decides", tensor(3e-4, -4e-4), tensor(2.0, -0.5), 1e-6),
        case("all zeros", tensor(0.0, 0.0), tensor(2.0, -0.5), 1e-6),
        case("another eps", tensor(0.3, -0.4), tensor(2.0, -0.5), 0.1),
        case("two rows of three", draw(2, 3, seed=1, scale=3.0), draw(3, seed=2), 1e-6),
        case("batch, seq, hidden", draw(2, 3, 4, seed=3, scale=0.2), draw(4, seed=4), 1e-6),
        case("large numbers", draw(2, 3, 4, seed=5, scale=1e4), draw(4, seed=6), 1e-6),
        case("four axes, not contiguous", draw(2, 3, 2, 4, seed=7).transpose(1, 2), draw(4, seed=8), 1e-6),
        case("float16, where 300 * 300 overflows", tensor(300, -100, dtype=HALF), tensor(2, -0.5, dtype=HALF), 1e-6),
        case("bfloat16, weights too", draw(4, 64, seed=9, dtype=BRAIN), draw(64, seed=10, dtype=BRAIN), 1e-6),
        case("bfloat16 with float32 weights", draw(4, 64, seed=11, dtype=BRAIN), draw(64, seed=12), 1e-6),
    ],
)


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.dtype == torch.float64 else x.float()


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return wide(x).square().mean(-1, keepdim=True)


@rms.mutant(
    "the mean is subtracted first",
    "that is LayerNorm. RMSNorm keeps the mean: adding a constant to x changes its result, and one reduction is saved.",
    "GPT-2 and BERT use LayerNorm (with a bias as well).",
)
def layer_norm(x, weight, eps):
    centered = wide(x) - wide(x).mean(-1, keepdim=True)
    return (weight * centered * torch.rsqrt(mean_square(centered) + eps)).to(x.dtype)


@rms.mutant(
    "x is divided by its standard deviation, so the mean is subtracted below the line but not above it",
    "the result has no fixed size any more: a vector with equal entries would be divided by almost nothing.",
)
def standard_deviation(x, weight, eps):
    return (weight * wide(x) * torch.rsqrt(wide(x).var(-1, keepdim=True, unbiased=False) + eps)).to(x.dtype)


@rms.mutant(
    "x is divided by torch.std(x), which subtracts the mean and divides by dim - 1",
    "RMSNorm subtracts nothing and divides by dim. Write the mean of the squares out.",
)
def unbiased_deviation(x, weight, eps):
    return (weight * wide(x) * torch.rsqrt(wide(x).var(-1, keepdim=True) + eps)).to(x.dtype)


@rms.mutant(
    "the squares are summed where their mean is wanted",
    "the result is smaller by sqrt(dim), 28 times at 768 features: it depends on the width of the model.",
    "F.normalize does this: it gives vectors of length 1.",
)
def sum_for_mean(x, weight, eps):
    return (weight * wide(x) * torch.rsqrt(wide(x).square().sum(-1, keepdim=True) + eps)).to(x.dtype)


@rms.mutant(
    "eps is added outside the root",
    "eps = 1e-6 inside the root stops the division at sqrt(eps) = 1e-3, outside only at 1e-6: small inputs come out "
    "up to a thousand times larger.",
)
def eps_outside(x, weight, eps):
    return (weight * wide(x) / (mean_square(x).sqrt() + eps)).to(x.dtype)


@rms.mutant("eps is not used", "a vector of zeros (a padded row, say) becomes 0 / 0 = NaN, and NaN spreads.")
def no_eps(x, weight, eps):
    return (weight * wide(x) * torch.rsqrt(mean_square(x))).to(x.dtype)


@rms.mutant(
    "eps is a number in the code, 1e-6, and not the argument",
    "checkpoints were trained with their own eps: 1e-6 in MiniMind-3, 1e-5 in MiniMind-2.",
)
def fixed_eps(x, weight, eps):
    return rms_norm(x, weight, 1e-6)


@rms.mutant(
    "the mean runs over the axis before the last, the positions, and not over the features",
    "each token is then scaled by its neighbors, later ones too, so a model could look into the future.",
)
def wrong_axis(x, weight, eps):
    axis = -2 if x.ndim > 1 else -1
    return (weight * wide(x) * torch.rsqrt(wide(x).square().mean(axis, keepdim=True) + eps)).to(x.dtype)


@rms.mutant(
    "one mean is taken over the whole tensor",
    "a token's result then depends on every other token of the batch. Say which axis: mean(-1, keepdim=True).",
)
def all_axes(x, weight, eps):
    return (weight * wide(x) * torch.rsqrt(wide(x).square().mean() + eps)).to(x.dtype)


@rms.mutant(
    "the mean lost its axis: keepdim=True is missing",
    "x is [.., dim] and the mean must be [.., 1] to be lined up with it. Without the 1, sizes clash, or fit by chance.",
)
def no_keepdim(x, weight, eps):
    return (weight * wide(x) * torch.rsqrt(wide(x).square().mean(-1) + eps)).to(x.dtype)


@rms.mutant(
    "the arithmetic stays in half precision",
    "float16 ends at 65504, so 300 * 300 is infinity and the result 0; small squares vanish. Go to float32 first.",
)
def half_arithmetic(x, weight, eps):
    return (weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


@rms.mutant(
    "the result is rounded to half precision before it is multiplied by the weight",
    "it is rounded twice then, and its error against float32 grows by about a third.",
    "MiniMind-2, Llama and Hugging Face round there. MiniMind-3 and torch.nn.RMSNorm round once, at the end.",
)
def cast_before_weight(x, weight, eps):
    return rms_norm(x, weight, eps, cast="before_weight")


@rms.mutant(
    "the cast back to the type of x comes before the product with the weight",
    "float32 weights then make the result float32 again, and the rest of the model with it.",
    "MiniMind-2, Llama and Hugging Face write it so, and load the weights in half precision.",
)
def promoted_by_weight(x, weight, eps):
    return weight * (wide(x) * torch.rsqrt(mean_square(x) + eps)).to(x.dtype)


@rms.mutant(
    "the result is not cast back to the type of x",
    "from here on the whole model would run in float32, at twice the memory. End with .to(x.dtype).",
)
def not_cast_back(x, weight, eps):
    return weight * (wide(x) * torch.rsqrt(mean_square(x) + eps))


@rms.mutant(
    "the weight is not used",
    "the weight is all that a norm learns: without it, no feature can be made louder than another.",
)
def no_weight(x, weight, eps):
    return (wide(x) * torch.rsqrt(mean_square(x) + eps)).to(x.dtype)


@rms.mutant(
    "x is multiplied by 1 + weight",
    "a weight trained as a plain factor then scales by one too much.",
    "Gemma stores its weights that way, around 0 and not around 1.",
)
def one_plus_weight(x, weight, eps):
    return ((1 + wide(weight)) * wide(x) * torch.rsqrt(mean_square(x) + eps)).to(x.dtype)


@rms.mutant("the weight is added, not multiplied", "an added vector is a bias; RMSNorm has none.")
def weight_added(x, weight, eps):
    return (wide(x) * torch.rsqrt(mean_square(x) + eps) + weight).to(x.dtype)


@rms.mutant(
    "x is multiplied by its rms, not divided by it",
    "large inputs become larger still. torch.rsqrt is 1 / sqrt; torch.sqrt is not.",
)
def multiplied(x, weight, eps):
    return (weight * wide(x) * torch.sqrt(mean_square(x) + eps)).to(x.dtype)


@rms.mutant(
    "the root is missing: x is divided by the mean of the squares",
    "doubling x then halves the result. A norm must not care about the scale of x.",
)
def no_root(x, weight, eps):
    return (weight * wide(x) / (mean_square(x) + eps)).to(x.dtype)


@rms.mutant(
    "x is divided by the mean of its absolute values",
    "that is another average: one loud feature counts for less than in the root of the mean square.",
)
def mean_absolute(x, weight, eps):
    return (weight * wide(x) / (wide(x).abs().mean(-1, keepdim=True) + eps)).to(x.dtype)


@rms.mutant(
    "the mean is squared, where the mean of the squares is wanted",
    "plus and minus cancel in a mean: a vector around 0 would be divided by almost nothing. Square first.",
)
def square_of_mean(x, weight, eps):
    return (weight * wide(x) * torch.rsqrt(wide(x).mean(-1, keepdim=True).square() + eps)).to(x.dtype)


# 2. qk_norm ----------------------------------------------------------------------------------------------------------


def qk_norm_reference(q, k, q_weight, k_weight, eps):
    """RMSNorm of each head's query and key on its own. q: [batch, seq, heads, head_dim]; weights: [head_dim]."""
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)


def qk_case(label: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, seed: int, scale: float):
    shape = (batch, seq, heads, head_dim), (batch, seq, kv_heads, head_dim)
    q, k = draw(*shape[0], seed=seed, scale=scale), draw(*shape[1], seed=seed + 1, scale=2 * scale)
    return case(label, q, k, draw(head_dim, seed=seed + 2), draw(head_dim, seed=seed + 3), 1e-6)


qk = Exercise(
    name="01_rmsnorm.qk_norm",
    title="QK-norm: the same norm on each head's query and key",
    signature="qk_norm(q, k, q_weight, k_weight, eps)",
    reference=qk_norm_reference,
    returns=("q", "k"),
    provides={"rms_norm": rms_norm},
    cases=[
        qk_case("one token, two heads of two, one K/V head", 1, 1, 2, 1, 2, seed=20, scale=1.0),
        qk_case("one token, four heads, two K/V heads", 1, 1, 4, 2, 4, seed=24, scale=0.3),
        qk_case("two sequences of three tokens", 2, 3, 4, 2, 4, seed=28, scale=5.0),
        qk_case("very small numbers, where eps decides", 1, 2, 4, 2, 4, seed=32, scale=5e-4),
    ],
)


@qk.mutant(
    "all heads of a token are normalized together",
    "a loud head then silences the others. Each head must have its own rms: a mean over head_dim only.",
    "OLMo 2 normalizes the whole projection before it is split, with a weight as wide as all heads.",
)
def heads_together(q, k, q_weight, k_weight, eps):
    return tuple(
        x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + eps) * w for x, w in ((q, q_weight), (k, k_weight))
    )


@qk.mutant(
    "the mean runs over the heads, not over head_dim",
    "feature 3 of one head has nothing to do with feature 3 of another. The last axis is the one.",
)
def over_heads(q, k, q_weight, k_weight, eps):
    return tuple(
        x * torch.rsqrt(x.square().mean(-2, keepdim=True) + eps) * w for x, w in ((q, q_weight), (k, k_weight))
    )


@qk.mutant(
    "the mean runs over the positions, not over head_dim",
    "a token's query would depend on the tokens after it, and on the length of the prompt.",
)
def over_positions(q, k, q_weight, k_weight, eps):
    return tuple(x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * w for x, w in ((q, q_weight), (k, k_weight)))


@qk.mutant(
    "queries and keys share one rms",
    "the ratio of their sizes stays in the scores, and that is what QK-norm is there to remove.",
)
def shared_rms(q, k, q_weight, k_weight, eps):
    scale = torch.rsqrt(torch.cat([q, k], dim=2).square().mean((2, 3), keepdim=True) + eps)
    return q * scale * q_weight, k * scale * k_weight


@qk.mutant("the keys are normalized with the weight of the queries", "the model learns two weights, one for each.")
def one_weight(q, k, q_weight, k_weight, eps):
    return rms_norm(q, q_weight, eps), rms_norm(k, q_weight, eps)


@qk.mutant("the two weights are swapped", "in a trained model they differ: look at the order of the arguments.")
def swapped_weights(q, k, q_weight, k_weight, eps):
    return rms_norm(q, k_weight, eps), rms_norm(k, q_weight, eps)


@qk.mutant("the keys are returned as they came", "a score is q . k: one large key still makes it as large as it likes.")
def only_queries(q, k, q_weight, k_weight, eps):
    return rms_norm(q, q_weight, eps), k


@qk.mutant(
    "each head is scaled to length 1, not to rms 1",
    "its numbers are smaller by sqrt(head_dim), so the scores by head_dim, and softmax is almost flat.",
    "the first paper on QK-norm (Henry and others, 2020) does this, with a learned factor for the scores.",
)
def unit_length(q, k, q_weight, k_weight, eps):
    return tuple(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) * w for x, w in ((q, q_weight), (k, k_weight)))


@qk.mutant(
    "the mean of each head is subtracted first",
    "MiniMind-3 uses RMSNorm here as everywhere, without a mean.",
    "ViT-22B puts LayerNorm on its queries and keys.",
)
def centered_heads(q, k, q_weight, k_weight, eps):
    return tuple(rms_norm(x - x.mean(-1, keepdim=True), w, eps) for x, w in ((q, q_weight), (k, k_weight)))


@qk.mutant("the weights are not used", "without them every head_dim feature counts the same in the score.")
def qk_no_weight(q, k, q_weight, k_weight, eps):
    return rms_norm(q, torch.ones_like(q_weight), eps), rms_norm(k, torch.ones_like(k_weight), eps)


@qk.mutant("keys come first in what is returned", "the caller unpacks q, k = ...; the order of a tuple is its meaning.")
def keys_first(q, k, q_weight, k_weight, eps):
    return rms_norm(k, k_weight, eps), rms_norm(q, q_weight, eps)


@qk.mutant("eps is not used", "a head of zeros becomes NaN, and small heads are blown up to full size.")
def qk_no_eps(q, k, q_weight, k_weight, eps):
    return rms_norm(q, q_weight, 0.0), rms_norm(k, k_weight, 0.0)


# 3. rms_norm_backward ------------------------------------------------------------------------------------------------


def backward_reference(x, weight, grad, eps):
    """The gradient of sum(grad * rms_norm(x, weight, eps)) with respect to x. All but weight: [..., dim]."""
    scale, scaled = inverse_rms(x, eps), weight * grad
    unit = x * scale
    return scale * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


backward = Exercise(
    name="01_rmsnorm.rms_norm_backward",
    title="The gradient of RMSNorm by hand, without autograd",
    signature="rms_norm_backward(x, weight, grad, eps)",
    reference=backward_reference,
    returns=("gradient of x",),
    cases=[
        case("two numbers", tensor(3.0, 4.0), tensor(2.0, -0.5), tensor(1.0, 0.5), 1e-6),
        case("very small numbers, where eps decides", tensor(3e-4, 4e-4), tensor(2.0, -0.5), tensor(1.0, 0.5), 1e-6),
        case("two rows of three", draw(2, 3, seed=40, scale=2), draw(3, seed=41), draw(2, 3, seed=42), 1e-6),
        case("batch, seq, hidden", draw(2, 3, 4, seed=43, scale=0.3), draw(4, seed=44), draw(2, 3, 4, seed=45), 1e-6),
    ],
)


@backward.mutant(
    "the gradient is only divided by the rms, as if the rms were a constant",
    "the rms depends on x too. The missing part removes the component along x: stretching x changes nothing, so "
    "J x = 0.",
)
def projection_forgotten(x, weight, grad, eps):
    return weight * grad * inverse_rms(x, eps)


@backward.mutant(
    "the part along x is added, not subtracted",
    "a gradient along x would be doubled, where it should vanish.",
)
def projection_added(x, weight, grad, eps):
    scale, scaled = inverse_rms(x, eps), weight * grad
    unit = x * scale
    return scale * (scaled + unit * (scaled * unit).mean(-1, keepdim=True))


@backward.mutant(
    "the products are summed where their mean is wanted",
    "too much is taken away, dim times. The 1 / dim comes from the mean inside the rms.",
)
def projection_summed(x, weight, grad, eps):
    scale, scaled = inverse_rms(x, eps), weight * grad
    unit = x * scale
    return scale * (scaled - unit * (scaled * unit).sum(-1, keepdim=True))


@backward.mutant(
    "x itself stands where x / rms belongs",
    "the part that is removed has the wrong size, by the square of the rms: only at rms 1 is it right.",
)
def raw_x(x, weight, grad, eps):
    scaled = weight * grad
    return inverse_rms(x, eps) * (scaled - x * (scaled * x).mean(-1, keepdim=True))


@backward.mutant("the weight is not used", "the output is weight * x / rms, so every gradient passes the weight first.")
def backward_no_weight(x, weight, grad, eps):
    return backward_reference(x, torch.ones_like(weight), grad, eps)


@backward.mutant(
    "the weight is multiplied at the end",
    "backwards the order is reversed: the weight comes first, then the norm. Only for equal weights is it the same.",
)
def weight_last(x, weight, grad, eps):
    return weight * backward_reference(x, torch.ones_like(weight), grad, eps)


@backward.mutant(
    "the weight is missing in the part along x",
    "both parts start from weight * grad. Give that product a name and use it twice.",
)
def weight_once(x, weight, grad, eps):
    scale = inverse_rms(x, eps)
    unit = x * scale
    return scale * (weight * grad - unit * (grad * unit).mean(-1, keepdim=True))


@backward.mutant(
    "the division by the rms is missing",
    "the larger x is, the less a small change of it matters: the gradient falls as 1 / rms.",
)
def not_divided(x, weight, grad, eps):
    return backward_reference(x, weight, grad, eps) / inverse_rms(x, eps)


@backward.mutant("the result is multiplied by the rms, not divided by it", "the gradient falls as 1 / rms, not rises.")
def backward_multiplied(x, weight, grad, eps):
    return backward_reference(x, weight, grad, eps) / inverse_rms(x, eps).square()


@backward.mutant(
    "the mean of the gradient is subtracted as well",
    "that is the gradient of LayerNorm, whose mean is a second thing that depends on x. RMSNorm has no mean.",
)
def layer_norm_backward(x, weight, grad, eps):
    scale, scaled = inverse_rms(x, eps), weight * grad
    unit = x * scale
    return scale * (scaled - scaled.mean(-1, keepdim=True) - unit * (scaled * unit).mean(-1, keepdim=True))


@backward.mutant("eps is not used", "for small inputs eps is most of the divisor, in the gradient as well.")
def backward_no_eps(x, weight, grad, eps):
    return backward_reference(x, weight, grad, 0.0)


@backward.mutant(
    "one mean is taken over the whole tensor",
    "each token has its own rms, so each token has its own gradient: mean(-1, keepdim=True).",
)
def backward_all_axes(x, weight, grad, eps):
    scale, scaled = inverse_rms(x, eps), weight * grad
    unit = x * scale
    return scale * (scaled - unit * (scaled * unit).mean())


EXERCISES = [rms, qk, backward]
