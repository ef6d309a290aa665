"""Exercises of notebook 07: the block, the gain of a stack, and the gradient that reaches each block."""

from collections.abc import Callable
from itertools import pairwise

import torch

from ..normalization import rms_norm
from .framework import Exercise, case, draw


class Part:
    """A function of the stream, with words that a report can show."""

    def __init__(self, words: str, function: Callable):
        self.words, self.function = words, function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)

    def __repr__(self) -> str:
        return self.words


# 1. block ------------------------------------------------------------------------------------------------------------


def block_reference(x, attention, mlp, input_norm, post_attention_norm):
    """x: [batch, seq, hidden]; the others are functions of such a tensor."""
    x = x + attention(input_norm(x))
    return x + mlp(post_attention_norm(x))


def norm_part(seed: int) -> Part:
    weight = 1 + 0.5 * draw(6, seed=seed)
    return Part("RMSNorm with a weight of its own", lambda x: rms_norm(x, weight))


def matrix_part(words: str, seed: int, before: Callable = torch.tanh) -> Part:
    matrix = draw(6, 6, seed=seed, scale=0.5)
    return Part(words, lambda x: before(x) @ matrix)


def mean_so_far(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(dim=-2) / torch.arange(1, x.shape[-2] + 1)[:, None]


def keeping_parts() -> tuple[Part, Part]:
    """Attention that keeps its input and its output, as a hook does, and a feed-forward that reads both."""
    kept = []

    def attention(x):
        kept[:] = x, 2 * x
        return kept[1]

    def mlp(x):
        return x + 3 * kept[0] + 5 * kept[1]

    return Part("x -> 2 x, keeps what it saw", attention), Part("x -> x + what attention kept", mlp)


whole = Exercise(
    name="07_residual_block.block",
    title="The block: two parts read a normed copy, and add to the stream",
    signature="block(x, attention, mlp, input_norm, post_attention_norm)",
    reference=block_reference,
    cases=[
        case(
            "one token of two numbers, four small functions",
            torch.tensor([[[1.0, 2.0]]]),
            Part("x -> 10 x", lambda x: 10 * x),
            Part("x -> x squared", torch.square),
            Part("x -> x - 3", lambda x: x - 3),
            Part("x -> x / 2", lambda x: x / 2),
        ),
        case(
            "parts that keep what they saw, as a hook does",
            draw(1, 2, 4, seed=700),
            *keeping_parts(),
            Part("x -> x, the same tensor", lambda x: x),
            Part("x -> x / 2", lambda x: x / 2),
        ),
        case(
            "a feed-forward whose output lies in the memory of the stream",
            draw(1, 2, 4, seed=706),
            Part("x -> 2 x", lambda x: 2 * x),
            Part("x -> its first number, spread out as a view", lambda x: x[..., :1].expand_as(x)),
            Part("x -> x / 2", lambda x: x / 2),
            Part("x -> x, the same tensor", lambda x: x),
        ),
        case(
            "two texts of three tokens, two different norms",
            draw(2, 3, 6, seed=701, scale=2.0),
            matrix_part("mean of the tokens so far, times a matrix", 702, mean_so_far),
            matrix_part("tanh, times a matrix", 703),
            norm_part(704),
            norm_part(705),
        ),
    ],
)


@whole.mutant(
    "the norm stands after the addition: norm(x + part(x)), post-norm",
    "the stream is then normed 16 times on its way, and nothing flows straight from the embedding to the end. Weights "
    "trained for pre-norm turn into noise.",
    "the Transformer of 2017 and BERT do it so.",
)
def post_norm(x, attention, mlp, input_norm, post_attention_norm):
    x = input_norm(x + attention(x))
    return post_attention_norm(x + mlp(x))


@whole.mutant(
    "each part is added to the normed x, not to x",
    "norm(x) + part(norm(x)) throws the size of the stream away at every part. The copy is for the part alone.",
    "BLOOM has this as an option, apply_residual_connection_post_layernorm.",
)
def residual_from_the_norm(x, attention, mlp, input_norm, post_attention_norm):
    x = input_norm(x)
    x = post_attention_norm(x + attention(x))
    return x + mlp(x)


@whole.mutant(
    "attention's output is added to the normed x, not to x",
    "x = input_norm(x) overwrites the stream. Give the copy a name of its own, or none.",
)
def first_residual_from_the_norm(x, attention, mlp, input_norm, post_attention_norm):
    x = input_norm(x)
    x = x + attention(x)
    return x + mlp(post_attention_norm(x))


@whole.mutant(
    "the feed-forward's output is added to the normed x, not to x",
    "x = post_attention_norm(x) overwrites the stream. Give the copy a name of its own, or none.",
)
def second_residual_from_the_norm(x, attention, mlp, input_norm, post_attention_norm):
    x = post_attention_norm(x + attention(input_norm(x)))
    return x + mlp(x)


@whole.mutant(
    "the feed-forward is added to the block's input: what attention added is lost",
    "the second sum begins with the result of the first. Name that result, and use it twice.",
)
def second_from_the_first_x(x, attention, mlp, input_norm, post_attention_norm):
    return x + mlp(post_attention_norm(x + attention(input_norm(x))))


@whole.mutant(
    "the feed-forward reads the block's input, not the stream after attention",
    "the two parts then work side by side, and a feed-forward cannot use what its attention just fetched.",
    "GPT-J and PaLM run both parts in parallel.",
)
def parallel(x, attention, mlp, input_norm, post_attention_norm):
    return x + attention(input_norm(x)) + mlp(post_attention_norm(x))


@whole.mutant(
    "the feed-forward reads attention's output alone, not the stream",
    "the second norm reads x after the first addition: the embedding and all earlier blocks are in it.",
)
def mlp_of_attended(x, attention, mlp, input_norm, post_attention_norm):
    attended = attention(input_norm(x))
    return x + attended + mlp(post_attention_norm(attended))


@whole.mutant(
    "the two norms are exchanged",
    "each has a weight of its own, trained for the part behind it. At first both weights are 1, so a test on a new "
    "model does not notice.",
)
def exchanged_norms(x, attention, mlp, input_norm, post_attention_norm):
    x = x + attention(post_attention_norm(x))
    return x + mlp(input_norm(x))


@whole.mutant(
    "input_norm stands before both parts",
    "the second norm has a weight of its own. A new model has ones in both, so only a trained one shows the mistake.",
)
def one_norm(x, attention, mlp, input_norm, post_attention_norm):
    x = x + attention(input_norm(x))
    return x + mlp(input_norm(x))


@whole.mutant(
    "attention reads the stream itself: its norm is missing",
    "the stream grows from block to block; without the norm attention gets larger and larger numbers.",
)
def attention_without_norm(x, attention, mlp, input_norm, post_attention_norm):
    x = x + attention(x)
    return x + mlp(post_attention_norm(x))


@whole.mutant(
    "the feed-forward reads the stream itself: its norm is missing",
    "the stream grows from block to block; without the norm the feed-forward gets larger and larger numbers.",
)
def mlp_without_norm(x, attention, mlp, input_norm, post_attention_norm):
    x = x + attention(input_norm(x))
    return x + mlp(x)


@whole.mutant(
    "both norms are missing: the parts read the stream itself",
    "the stream grows from block to block, and the parts would get larger and larger numbers.",
)
def no_norms(x, attention, mlp, input_norm, post_attention_norm):
    x = x + attention(x)
    return x + mlp(x)


@whole.mutant(
    "the norm stands behind the part: x + norm(part(x))",
    "the part then reads the stream itself, which grows; its norm belongs in front of it: part(norm(x)).",
    "OLMo 2 norms the outputs, not the inputs.",
)
def norm_behind_the_part(x, attention, mlp, input_norm, post_attention_norm):
    x = x + input_norm(attention(x))
    return x + post_attention_norm(mlp(x))


@whole.mutant(
    "attention and feed-forward are exchanged",
    "attention comes first: the feed-forward works on what attention fetched from other tokens.",
)
def exchanged_parts(x, attention, mlp, input_norm, post_attention_norm):
    x = x + mlp(input_norm(x))
    return x + attention(post_attention_norm(x))


@whole.mutant("the feed-forward is missing", "the equation has two lines; this is only the first.")
def only_attention(x, attention, mlp, input_norm, post_attention_norm):
    return x + attention(input_norm(x))


@whole.mutant(
    "attention replaces the stream: the first addition is missing",
    "what the blocks before wrote is lost, and so is the straight way of the gradient.",
)
def first_add_missing(x, attention, mlp, input_norm, post_attention_norm):
    x = attention(input_norm(x))
    return x + mlp(post_attention_norm(x))


@whole.mutant(
    "the feed-forward replaces the stream: the second addition is missing",
    "what was in the stream is lost, and so is the straight way of the gradient.",
)
def second_add_missing(x, attention, mlp, input_norm, post_attention_norm):
    return mlp(post_attention_norm(x + attention(input_norm(x))))


@whole.mutant(
    "both additions are missing",
    "the parts are chained: each must pass on whatever later blocks need, and the gradient has no straight way.",
)
def no_residual(x, attention, mlp, input_norm, post_attention_norm):
    return mlp(post_attention_norm(attention(input_norm(x))))


@whole.mutant(
    "the output of each part is normed too",
    "each part then adds a vector of the norm's size, however little it has to say.",
    "Gemma 2 norms before and after each part, with four norms per block.",
)
def sandwich(x, attention, mlp, input_norm, post_attention_norm):
    x = x + input_norm(attention(input_norm(x)))
    return x + post_attention_norm(mlp(post_attention_norm(x)))


@whole.mutant(
    "the addition writes into the stream itself, in place: x += attended",
    "whoever kept that tensor, a hook or the norm, now holds other numbers, and autograd may refuse the way back. A "
    "clone at the top does not help: the norm reads the clone. x + attended is a new tensor.",
)
def in_place_stream(x, attention, mlp, input_norm, post_attention_norm):
    x += attention(input_norm(x))
    return x + mlp(post_attention_norm(x))


@whole.mutant(
    "the stream is added into attention's output in place: attended += x",
    "a hook on attention that kept its output now holds the stream, without any error. x + attended is a new tensor.",
    "MiniMind's own code adds so; the core does not.",
)
def in_place_attended(x, attention, mlp, input_norm, post_attention_norm):
    attended = attention(input_norm(x))
    attended += x
    return attended + mlp(post_attention_norm(attended))


@whole.mutant(
    "the second addition writes into the stream in place: x += fed",
    "the second norm has read this x. Autograd kept it for the way back, and refuses when you train. x + fed is a new "
    "tensor.",
)
def second_in_place(x, attention, mlp, input_norm, post_attention_norm):
    x = x + attention(input_norm(x))
    x += mlp(post_attention_norm(x))
    return x


# 2. stream_gain ------------------------------------------------------------------------------------------------------


def stream_gain_reference(jacobians):
    """jacobians: [blocks, hidden, hidden], block 0 first. Returns [hidden, hidden]."""
    gain = torch.eye(jacobians.shape[-1], dtype=jacobians.dtype)
    for jacobian in jacobians:
        gain = gain + jacobian @ gain
    return gain


def identity(jacobians: torch.Tensor) -> torch.Tensor:
    return torch.eye(jacobians.shape[-1], dtype=jacobians.dtype)


def product(factors, start: torch.Tensor) -> torch.Tensor:
    for factor in factors:
        start = factor @ start
    return start


gain = Exercise(
    name="07_residual_block.stream_gain",
    title="The gain of a stack: the product of I + J over its blocks",
    signature="stream_gain(jacobians)",
    reference=stream_gain_reference,
    cases=[
        case("one block, one number: 1 - 0.9", torch.tensor([[[-0.9]]])),
        case("three blocks of one number", torch.tensor([[[1.0]], [[2.0]], [[3.0]]])),
        case("two blocks that do not commute", torch.tensor([[[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [2.0, 0.0]]])),
        case("four blocks of three numbers", draw(4, 3, 3, seed=710)),
        case("eight blocks, float64", draw(8, 5, 5, seed=711, scale=0.3, dtype=torch.float64)),
    ],
)


@gain.mutant(
    "the factors stand in the wrong order: block 0 on the left",
    "a nudge meets block 0 first, so its matrix stands next to the nudge: (I + J_last) ... (I + J_0). Matrices do not "
    "commute.",
)
def wrong_order(jacobians):
    return product(identity(jacobians) + jacobians.flip(0), identity(jacobians))


@gain.mutant(
    "the identity is missing: the product of the J alone",
    "that is the gain of a chain without residuals. Each block passes x on and adds: I + J.",
)
def no_identity(jacobians):
    return product(jacobians, identity(jacobians))


@gain.mutant(
    "the J are added up: I + sum of J",
    "that is only the first order. A block also answers to what the blocks before it added, so the factors multiply.",
    "for small J it is a good approximation.",
)
def first_order(jacobians):
    return identity(jacobians) + jacobians.sum(dim=0)


@gain.mutant(
    "the identity is added once, to the product of the J",
    "the straight way runs past every single block: each factor is I + J.",
)
def identity_once(jacobians):
    return identity(jacobians) + product(jacobians, identity(jacobians))


@gain.mutant(
    "the factors are added up, not multiplied",
    "the blocks come one after the other: the output of one is the input of the next.",
)
def sum_of_factors(jacobians):
    return (identity(jacobians) + jacobians).sum(dim=0)


@gain.mutant(
    "the factors are multiplied number by number, with *",
    "the product of matrices is @. The star multiplies entries that stand in the same place.",
)
def star(jacobians):
    return (identity(jacobians) + jacobians).prod(dim=0)


@gain.mutant(
    "1 was added to every entry, where the identity matrix belongs",
    "1 + J broadcasts over the matrix. torch.eye has ones on the diagonal only.",
)
def ones_everywhere(jacobians):
    return product(1 + jacobians, identity(jacobians))


@gain.mutant(
    "the matrices are transposed",
    "row i of J belongs to output i. The transposed product is the way of the gradient, as columns.",
)
def transposed(jacobians):
    return stream_gain_reference(jacobians).T


@gain.mutant(
    "J is taken away: the product of I - J",
    "the block adds its part to the stream: the plus of x + part(x) stays in the slope.",
)
def minus(jacobians):
    return product(identity(jacobians) - jacobians, identity(jacobians))


@gain.mutant(
    "the identity is added to the product so far: I + J times the gain",
    "then only J acts on the gain so far. The stream passes it on as well: gain + J times gain.",
)
def identity_plus_rest(jacobians):
    total = identity(jacobians)
    for jacobian in jacobians:
        total = identity(jacobians) + jacobian @ total
    return total


@gain.mutant("the loop starts with zeros", "zero times anything is zero. A product starts with the identity matrix.")
def starts_with_zeros(jacobians):
    return product(identity(jacobians) + jacobians, torch.zeros_like(jacobians[0]))


@gain.mutant(
    "the loop starts with a matrix full of ones",
    "the neutral element of @ is the identity matrix, torch.eye: ones on the diagonal only.",
)
def starts_with_ones(jacobians):
    return product(identity(jacobians) + jacobians, torch.ones_like(jacobians[0]))


@gain.mutant("only block 0 is used", "is the `return` inside the loop? It ends the function after one round.")
def only_first(jacobians):
    return stream_gain_reference(jacobians[:1])


@gain.mutant("the last block is left out", "a loop over range(len(jacobians) - 1) ends one block early.")
def last_missing(jacobians):
    return stream_gain_reference(jacobians[:-1])


@gain.mutant("the first block is left out", "start with the identity matrix, or with I + J of block 0.")
def first_missing(jacobians):
    return stream_gain_reference(jacobians[1:])


@gain.mutant(
    "one more I: the loop starts with I + J of block 0 and then meets block 0 again",
    "start either with the identity and loop over all blocks, or with block 0's factor and loop over the rest.",
)
def first_twice(jacobians):
    return stream_gain_reference(torch.cat([jacobians[:1], jacobians]))


# 3. layer_gradients --------------------------------------------------------------------------------------------------


def layer_gradients_reference(blocks, x, grad):
    """blocks: functions; x, grad: [batch, seq, hidden]. Returns [blocks + 1]."""
    stream = run(blocks, x)
    return torch.stack([g.norm() for g in torch.autograd.grad(stream[-1], stream, grad)])


def run(blocks, x: torch.Tensor) -> list[torch.Tensor]:
    stream = [x.clone().requires_grad_()]
    for block in blocks:
        stream.append(block(stream[-1]))
    return stream


def gradients(blocks, x, grad) -> tuple[torch.Tensor, ...]:
    stream = run(blocks, x)
    return torch.autograd.grad(stream[-1], stream, grad)


class Blocks(list):
    """A list of parts, shown in few words."""

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self))}]" if len(self) < 4 else f"{len(self)} functions"


def residual_parts(count: int, seed: int) -> Blocks:
    def one(matrix: torch.Tensor) -> Part:
        return Part("x -> x + tanh(x) times a matrix", lambda x: x + torch.tanh(x) @ matrix)

    return Blocks(one(matrix) for matrix in draw(count, 4, 4, seed=seed, scale=0.7))


arriving = Exercise(
    name="07_residual_block.layer_gradients",
    title="The size of the gradient at the embedding and after every block",
    signature="layer_gradients(blocks, x, grad)",
    reference=layer_gradients_reference,
    cases=[
        case(
            "two blocks on one token: 3 x, then x / 2",
            Blocks([Part("x -> 3 x", lambda x: 3 * x), Part("x -> x / 2", lambda x: x / 2)]),
            torch.tensor([[[1.0, 2.0]]]),
            torch.tensor([[[3.0, 4.0]]]),
        ),
        case("three blocks, two tokens", residual_parts(3, 720), draw(1, 2, 4, seed=721), draw(1, 2, 4, seed=722)),
        case("five blocks, two texts", residual_parts(5, 723), draw(2, 3, 4, seed=724), draw(2, 3, 4, seed=725)),
    ],
)


@arriving.mutant(
    "the list runs from the top down",
    "entry 0 belongs to the embedding. The gradient comes down, but the list is read from below, like the stack.",
)
def top_first(blocks, x, grad):
    return layer_gradients_reference(blocks, x, grad).flip(0)


@arriving.mutant(
    "the embedding is missing: one entry per block only",
    "the stream has one place more than the stack has blocks: before block 0. The embedding learns from that one.",
)
def without_embedding(blocks, x, grad):
    return layer_gradients_reference(blocks, x, grad)[1:]


@arriving.mutant(
    "the top is missing: the last entry should be the size of grad itself",
    "keep the output of the last block too.",
)
def without_top(blocks, x, grad):
    return layer_gradients_reference(blocks, x, grad)[:-1]


@arriving.mutant(
    "the gradient that was given is not used: 1 enters at every number of the top",
    "stream[-1].sum() sends ones down. Hand grad over: torch.autograd.grad(top, stream, grad), or top.backward(grad).",
)
def ones_at_the_top(blocks, x, grad):
    return layer_gradients_reference(blocks, x, torch.ones_like(grad))


@arriving.mutant(
    "these are squares: the root is missing",
    "the size of a gradient is the root of the sum of its squares, what .norm() gives.",
)
def squared(blocks, x, grad):
    return layer_gradients_reference(blocks, x, grad).square()


@arriving.mutant(
    "the rms of the gradient was taken, not its length",
    "divide by nothing: the length counts all numbers of all tokens, sqrt(sum of squares).",
)
def root_mean_square(blocks, x, grad):
    return torch.stack([g.square().mean().sqrt() for g in gradients(blocks, x, grad)])


@arriving.mutant(
    "the absolute values are added up",
    "that is the 1-norm. The length of a vector is the root of the sum of its squares.",
)
def one_norm_of_gradient(blocks, x, grad):
    return torch.stack([g.abs().sum() for g in gradients(blocks, x, grad)])


@arriving.mutant("the largest entry was taken, not the length", "use .norm() of the whole tensor.")
def largest(blocks, x, grad):
    return torch.stack([g.abs().max() for g in gradients(blocks, x, grad)])


@arriving.mutant(
    "these are the sizes of the stream, not of its gradient",
    "the stream goes up, the gradient comes down: torch.autograd.grad gives one tensor for each place.",
)
def of_the_stream(blocks, x, grad):
    return torch.stack([place.detach().norm() for place in run(blocks, x)])


@arriving.mutant(
    "every block reads the first x",
    "the blocks come one after the other: the output of one is the input of the next.",
)
def all_from_x(blocks, x, grad):
    start = x.clone().requires_grad_()
    sizes = [torch.autograd.grad(block(start), start, grad)[0].norm() for block in blocks]
    return torch.stack([*sizes, grad.norm()])


@arriving.mutant(
    "the stream is added once more to what a block returns",
    "these blocks are whole: the residual connection is inside them.",
)
def residual_twice(blocks, x, grad):
    return layer_gradients_reference([lambda x, block=block: x + block(x) for block in blocks], x, grad)


@arriving.mutant(
    "autograd does not follow x: nothing asked for its gradient",
    "begin the stream with a copy that wants one: x.clone().requires_grad_().",
)
def no_gradient_wanted(blocks, x, grad):
    stream = [x]
    for block in blocks:
        stream.append(block(stream[-1]))
    return torch.stack([g.norm() for g in torch.autograd.grad(stream[-1], stream, grad)])


@arriving.mutant(
    "the blocks run in reverse order",
    "only the gradient goes backwards. The text passes blocks[0] first.",
)
def blocks_reversed(blocks, x, grad):
    return layer_gradients_reference(list(reversed(blocks)), x, grad)


@arriving.mutant(
    "grad enters below every block, and not only at the top",
    "each entry is then the way through one block alone. The gradient passes all blocks above.",
)
def one_block_each(blocks, x, grad):
    stream = run(blocks, x)
    sizes = [torch.autograd.grad(above, below, grad, retain_graph=True)[0].norm() for below, above in pairwise(stream)]
    return torch.stack([*sizes, grad.norm()])


EXERCISES = [whole, gain, arriving]
