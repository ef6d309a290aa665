"""Exercises of notebook 02: a quarter turn, the tables, the rotation itself, and the two layouts."""

import torch
from einops import rearrange

from ..rope import apply_rotary_pos_emb, precompute_freqs_cis, rope_frequencies, rotate_half
from .framework import Exercise, case, draw

ROUNDING = {torch.float32: 1e-4}  # an angle of 60 radians has five exact digits behind the point in float32

# 1. rotate_half ------------------------------------------------------------------------------------------------------

quarter = Exercise(
    name="02_rope.rotate_half",
    title="A quarter turn of every pair (i, i + head_dim/2)",
    signature="rotate_half(x)",
    reference=rotate_half,
    cases=[
        case("one pair", torch.tensor([1.0, 2.0])),
        case("two pairs", torch.tensor([1.0, 2.0, 3.0, 4.0])),
        case("batch, seq, heads, head_dim", draw(2, 3, 2, 6, seed=100)),
        case("heads before seq, not contiguous", draw(2, 3, 4, 8, seed=101).transpose(1, 2)),
        case("bfloat16", draw(2, 8, seed=102, dtype=torch.bfloat16)),
    ],
)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.chunk(2, dim=-1)


def interleaved_turn(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


@quarter.mutant(
    "the minus sign is on the wrong half: [x2, -x1]",
    "that is a quarter turn clockwise. With it, cos and sin turn backwards: position 3 looks like position -3.",
)
def clockwise(x):
    x1, x2 = halves(x)
    return torch.cat([x2, -x1], dim=-1)


@quarter.mutant(
    "neighbors are paired, (0, 1) and (2, 3) and so on",
    "MiniMind's tables repeat the angles half by half. Here i belongs to i + head_dim/2.",
    "Meta's Llama code and GPT-J pair neighbors. After a permutation of the features both are the same.",
)
def interleaved(x):
    return interleaved_turn(x)


@quarter.mutant(
    "the numbers were sorted into even and odd places, not cut into halves",
    "x1 is the first half of the axis, as x.chunk(2, dim=-1) cuts it. x[..., ::2] takes every other number.",
)
def even_and_odd(x):
    return torch.cat([-x[..., 1::2], x[..., ::2]], dim=-1)


@quarter.mutant("the minus sign is missing: [x2, x1]", "that is a mirror, not a turn: the length of a vector changes.")
def mirrored(x):
    x1, x2 = halves(x)
    return torch.cat([x2, x1], dim=-1)


@quarter.mutant(
    "the halves stay where they are: [-x1, x2]",
    "a quarter turn takes (a, b) to (-b, a): the two numbers of a pair change places.",
)
def not_swapped(x):
    x1, x2 = halves(x)
    return torch.cat([-x1, x2], dim=-1)


@quarter.mutant(
    "both halves are negated: [-x2, -x1]", "that is a mirror. Only the half that moves to the front is negated."
)
def both_negated(x):
    x1, x2 = halves(x)
    return torch.cat([-x2, -x1], dim=-1)


@quarter.mutant(
    "everything is negated: -x, half a turn",
    "a quarter turn makes each vector perpendicular to itself: x . rotate_half(x) = 0.",
)
def half_turn(x):
    return -x


@quarter.mutant(
    "the order inside the halves is reversed, as torch.flip does",
    "pair i of the one half must meet pair i of the other, with the same frequency.",
)
def flipped(x):
    x1, x2 = halves(x)
    return torch.cat([-x2.flip(-1), x1.flip(-1)], dim=-1)


@quarter.mutant(
    "the tensor is cut along its first axis: dim=-1 is missing",
    "without dim, chunk and cat take axis 0. Here that is the batch; the pairs lie in head_dim, the last axis.",
)
def cut_first_axis(x):
    x1, x2 = x.chunk(2) if x.ndim > 1 else halves(x)
    return torch.cat([-x2, x1])


@quarter.mutant(
    "the tensor is cut along another axis, not along head_dim",
    "one half of the heads or positions would be turned into the other. Say dim=-1.",
)
def cut_elsewhere(x):
    if x.ndim == 1 or x.shape[-2] % 2:
        return rotate_half(x)
    x1, x2 = x.chunk(2, dim=-2)
    return torch.cat([-x2, x1], dim=-2)


# 2. precompute -------------------------------------------------------------------------------------------------------


def precompute_reference(head_dim, end, rope_base):
    """The tables cos, sin, each [end, head_dim]."""
    return precompute_freqs_cis(head_dim, end, rope_base)


def tables(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def positions(end: int) -> torch.Tensor:
    return torch.arange(end, dtype=torch.float32)


precompute = Exercise(
    name="02_rope.precompute",
    title="The tables of cos and sin, one row per position",
    signature="precompute(head_dim, end, rope_base)",
    reference=precompute_reference,
    returns=("cos", "sin"),
    tolerance=ROUNDING,
    cases=[
        case("three positions, two pairs, base 100", 4, 3, 100.0),
        case("two positions, three pairs", 6, 2, 1e4),
        case("MiniMind-3: 48 pairs, base 1e6", 96, 16, 1e6),
        case("sixty positions", 8, 60, 1e4),
    ],
)


@precompute.mutant(
    "positions count from 1",
    "the first token must stay unturned. Distances survive, but tables of other models and cached keys do not match.",
)
def from_one(head_dim, end, rope_base):
    return tables(torch.outer(positions(end) + 1, rope_frequencies(head_dim, rope_base)))


@precompute.mutant(
    "each angle is repeated in place, a, a, b, b and so on",
    "rotate_half pairs i with i + head_dim/2, so both halves need the same list of angles: a, b, ..., a, b, ...",
    "this is the table for the interleaved layout of Meta's Llama code and GPT-J.",
)
def interleaved_table(head_dim, end, rope_base):
    angles = torch.outer(positions(end), rope_frequencies(head_dim, rope_base)).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


@precompute.mutant(
    "the tables are only head_dim/2 wide",
    "each angle serves two numbers, so the angles are written twice: torch.cat([angles, angles], dim=-1).",
    "kernels such as flash-attention's take the half table and repeat it themselves.",
)
def half_width(head_dim, end, rope_base):
    angles = torch.outer(positions(end), rope_frequencies(head_dim, rope_base))
    return angles.cos(), angles.sin()


@precompute.mutant(
    "each of the head_dim numbers got a frequency of its own",
    "the two numbers of a pair must turn together: head_dim/2 frequencies, each written twice.",
)
def one_each(head_dim, end, rope_base):
    angles = torch.outer(positions(end), rope_base ** -(positions(head_dim) / head_dim))
    return angles.cos(), angles.sin()


@precompute.mutant("cos and sin are swapped", "position 0 must have cos 1 and sin 0: no turn.")
def swapped_tables(head_dim, end, rope_base):
    return precompute_reference(head_dim, end, rope_base)[::-1]


@precompute.mutant(
    "the exponent lacks its minus sign",
    "the frequencies then grow to the base itself, a million radians per position. They must fall from 1.",
)
def growing_frequencies(head_dim, end, rope_base):
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return tables(torch.outer(positions(end), rope_base**exponents))


@precompute.mutant(
    "the exponent is -i / head_dim, where -2i / head_dim belongs",
    "the slowest pair is then only sqrt(base) slower than the fastest. torch.arange(0, head_dim, 2) gives the 2i.",
)
def two_forgotten(head_dim, end, rope_base):
    exponents = torch.arange(head_dim // 2, dtype=torch.float32) / head_dim
    return tables(torch.outer(positions(end), rope_base**-exponents))


@precompute.mutant(
    "the exponent is -4i / head_dim, where -2i / head_dim belongs",
    "the 2i are divided by head_dim, not by its half: the slowest pair is then slower by the base once more.",
)
def divided_by_pairs(head_dim, end, rope_base):
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / (head_dim // 2)
    return tables(torch.outer(positions(end), rope_base**-exponents))


@precompute.mutant(
    "pairs count from 1",
    "pair 0 must turn by one radian per position: base^0 = 1.",
    "the RoFormer paper counts i from 1, but writes -2(i - 1) / d.",
)
def pairs_from_one(head_dim, end, rope_base):
    exponents = torch.arange(2, head_dim + 2, 2, dtype=torch.float32) / head_dim
    return tables(torch.outer(positions(end), rope_base**-exponents))


@precompute.mutant(
    "the exponents reach -1: the last pair has frequency 1 / base",
    "2i / head_dim ends at (head_dim - 2) / head_dim, one step before 1.",
)
def endpoint_included(head_dim, end, rope_base):
    exponents = torch.linspace(0, 1, head_dim // 2)
    return tables(torch.outer(positions(end), rope_base**-exponents))


@precompute.mutant(
    "the frequencies fall in equal steps, not by equal factors",
    "RoPE needs wavelengths from a few tokens to many thousands, so each pair is slower by the same factor.",
)
def linear_frequencies(head_dim, end, rope_base):
    return tables(torch.outer(positions(end), 1 - torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


@precompute.mutant(
    "the base is 10000 in the code, and not the argument",
    "MiniMind and Qwen3 use a base of a million: their slow pairs turn almost a hundred times slower.",
    "10000 is the base of the RoFormer paper and of the first Llama.",
)
def fixed_base(head_dim, end, rope_base):
    return precompute_reference(head_dim, end, 1e4)


@precompute.mutant(
    "the base is a million in the code, and not the argument",
    "that is MiniMind's base. The argument may be another: 10,000 in the paper, 100 in the smallest case here.",
)
def fixed_million(head_dim, end, rope_base):
    return precompute_reference(head_dim, end, 1e6)


@precompute.mutant(
    "the frequencies were taken as turns, and multiplied by 2 pi",
    "they are radians per position already: pair 0 turns one radian, not one full turn, per token.",
)
def turns_for_radians(head_dim, end, rope_base):
    return tables(torch.outer(positions(end), 2 * torch.pi * rope_frequencies(head_dim, rope_base)))


# 3. apply_rotary -----------------------------------------------------------------------------------------------------


def apply_rotary_reference(q, k, cos, sin):
    """q: [batch, seq, heads, head_dim]; k: [batch, seq, kv_heads, head_dim]; cos, sin: [seq, head_dim]."""
    return apply_rotary_pos_emb(q, k, cos, sin)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, quarter_turn=rotate_half) -> torch.Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return (x * cos + quarter_turn(x) * sin).to(x.dtype)


def rotary_case(label, batch, seq, heads, kv_heads, head_dim, seed, start=0, dtype=torch.float32):
    cos, sin = (table[start:] for table in precompute_freqs_cis(head_dim, start + seq, 1e4))
    q, k = draw(batch, seq, heads, head_dim, seed=seed), draw(batch, seq, kv_heads, head_dim, seed=seed + 1)
    return case(label, q.to(dtype), k.to(dtype), cos, sin)


rotary = Exercise(
    name="02_rope.apply_rotary",
    title="Turn every pair of q and k by the angle of its position",
    signature="apply_rotary(q, k, cos, sin)",
    reference=apply_rotary_reference,
    returns=("q", "k"),
    provides={"rotate_half": rotate_half},
    tolerance=ROUNDING,
    cases=[
        rotary_case("one token at position 1, one head, two pairs", 1, 1, 1, 1, 4, seed=110, start=1),
        rotary_case("two tokens, two heads", 1, 2, 2, 2, 4, seed=112),
        rotary_case("four heads, two K/V heads, three tokens, from position 5", 2, 3, 4, 2, 8, seed=114, start=5),
        rotary_case("as many tokens as heads", 2, 4, 4, 2, 8, seed=116),
        rotary_case("bfloat16, at position 200", 2, 4, 4, 2, 32, seed=118, start=200, dtype=torch.bfloat16),
    ],
)


@rotary.mutant(
    "the turn goes the other way: the sine has the wrong sign",
    "q and k still agree with each other, but not with any trained weights: check rotate_half, or + against -.",
)
def turned_backwards(q, k, cos, sin):
    return turn(q, cos, -sin), turn(k, cos, -sin)


@rotary.mutant(
    "neighbors (0, 1), (2, 3) are paired, but the table repeats its angles half by half",
    "the two numbers of a pair then get two different angles: it is no rotation, lengths change, and a score depends "
    "on the absolute position.",
    "Meta's Llama code pairs neighbors, with a table made for it.",
)
def mixed_layouts(q, k, cos, sin):
    return turn(q, cos, sin, interleaved_turn), turn(k, cos, sin, interleaved_turn)


@rotary.mutant(
    "neighbors are paired, with angles to match",
    "it is a good rotation, but of other pairs: weights trained for MiniMind's layout turn into noise.",
    "Meta's Llama code and GPT-J do this. Their weights need a permutation to run here: the next exercise.",
)
def interleaved_layout(q, k, cos, sin):
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    return turn(q, cos, sin, interleaved_turn), turn(k, cos, sin, interleaved_turn)


@rotary.mutant(
    "the table was rewritten as a, a, b, b, ... but rotate_half pairs the halves",
    "the two numbers of a pair get two different angles, so it is no rotation. Use the table as it comes.",
)
def interleaved_angles(q, k, cos, sin):
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos, sin))
    return turn(q, cos, sin), turn(k, cos, sin)


@rotary.mutant(
    "k is not turned",
    "a score then depends on the position of q alone, and not on the distance between the two.",
)
def only_q(q, k, cos, sin):
    return turn(q, cos, sin), k


@rotary.mutant("q is not turned", "a score then depends on the position of k alone, and not on the distance.")
def only_k(q, k, cos, sin):
    return q, turn(k, cos, sin)


@rotary.mutant(
    "k is turned the opposite way of q",
    "a score then depends on the sum of the two positions, not on their difference.",
)
def opposite_turns(q, k, cos, sin):
    return turn(q, cos, sin), turn(k, cos, -sin)


@rotary.mutant(
    "the sine part of k was made from q",
    "each vector is turned by itself: rotate_half(k) belongs into the line of k.",
)
def q_in_the_line_of_k(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos + rotate_half(q) * sin).to(q.dtype), (k * cos + rotate_half(q) * sin).to(k.dtype)


@rotary.mutant("cos and sin are swapped", "at position 0 (cos 1, sin 0) nothing may change.")
def swapped_cos_sin(q, k, cos, sin):
    return turn(q, sin, cos), turn(k, sin, cos)


@rotary.mutant(
    "the tables run along the heads, not along the positions: their new axis is missing, or in front",
    "each head is then turned by its own number, the same for all tokens: no positions at all. cos.unsqueeze(1) makes "
    "[seq, 1, head_dim].",
    "unsqueeze(0) is right where q is [batch, heads, seq, head_dim], as in Hugging Face.",
)
def wrong_axis(q, k, cos, sin):
    def along_heads(x):
        return (x * cos + rotate_half(x) * sin).to(x.dtype)

    return along_heads(q), along_heads(k)


@rotary.mutant(
    "the tables got their new axis at the end",
    "axes are lined up from the right: head_dim must stay last. cos.unsqueeze(1) makes [seq, 1, head_dim].",
)
def axis_at_the_end(q, k, cos, sin):
    return tuple((x * cos[..., None] + rotate_half(x) * sin[..., None]).to(x.dtype) for x in (q, k))


@rotary.mutant(
    "rotate_half is missing: x cos + x sin",
    "that only stretches each number. A rotation mixes the two numbers of a pair.",
)
def no_quarter_turn(q, k, cos, sin):
    return turn(q, cos, sin, lambda x: x), turn(k, cos, sin, lambda x: x)


@rotary.mutant(
    "only the cosine part is there", "x cos alone shrinks the vector. The sine of the other number is missing."
)
def only_cosine(q, k, cos, sin):
    return turn(q, cos, 0 * sin), turn(k, cos, 0 * sin)


@rotary.mutant(
    "the tables were cast to half precision before the product",
    "bfloat16 has three digits. The tables stay in float32, and the result is rounded once.",
    "Hugging Face casts its tables to the type of the model.",
)
def half_tables(q, k, cos, sin):
    return turn(q, cos.to(q.dtype), sin.to(q.dtype)), turn(k, cos.to(k.dtype), sin.to(k.dtype))


@rotary.mutant(
    "the result is not cast back to the type of q and k",
    "the float32 tables make everything float32, and attention then meets two types. End with .to(q.dtype).",
)
def not_cast_back(q, k, cos, sin):
    return turn(q.float(), cos, sin), turn(k.float(), cos, sin)


@rotary.mutant(
    "k comes first in what is returned", "the caller unpacks q, k = ...; the order of a tuple is its meaning."
)
def k_first(q, k, cos, sin):
    return turn(k, cos, sin), turn(q, cos, sin)


# 4. half_from_interleaved --------------------------------------------------------------------------------------------


def half_from_interleaved_reference(x):
    """Features a0 b0 a1 b1 ... -> a0 a1 ... b0 b1 ... on the last axis."""
    return rearrange(x, "... (pairs two) -> ... (two pairs)", two=2)


permutation = Exercise(
    name="02_rope.half_from_interleaved",
    title="Reorder features from the interleaved to the half-split layout",
    signature="half_from_interleaved(x)",
    reference=half_from_interleaved_reference,
    cases=[
        case("two pairs", torch.tensor([1.0, 2.0, 3.0, 4.0])),
        case("three pairs", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
        case("four pairs", torch.arange(1.0, 9.0)),
        case("batch, seq, heads, head_dim", draw(2, 4, 2, 6, seed=130)),
        case("not contiguous", draw(2, 4, 2, 8, seed=131).transpose(1, 2)),
    ],
)


@permutation.mutant(
    "it is the way back, from halves to neighbors",
    "for two pairs both are the same, from three on they are not. In einops: (pairs two) -> (two pairs).",
)
def way_back(x):
    return rearrange(x, "... (two pairs) -> ... (pairs two)", two=2)


@permutation.mutant(
    "the odd features come first",
    "the first number of each pair belongs to the first half, else every turn goes backwards.",
)
def odd_first(x):
    return torch.cat([x[..., 1::2], x[..., ::2]], dim=-1)


@permutation.mutant("the two halves are swapped", "pairs must be taken apart: evens to the front, odds to the back.")
def halves_swapped(x):
    return x.roll(x.shape[-1] // 2, -1)


@permutation.mutant("nothing moves", "a reshape and back leaves the order. The two axes must be swapped in between.")
def unchanged(x):
    return x.clone()


@permutation.mutant("the order is reversed", "inside each half the pairs keep their order, fast ones first.")
def reversed_order(x):
    return x.flip(-1)


@permutation.mutant(
    "the two numbers of each pair are swapped, in place", "the pairs must be taken apart, not turned over."
)
def pairs_swapped(x):
    return rearrange(
        rearrange(x, "... (pairs two) -> ... pairs two", two=2).flip(-1), "... pairs two -> ... (pairs two)"
    )


@permutation.mutant("the sorting is along the axis before the last", "the pairs lie in head_dim, the last axis.")
def another_axis(x):
    if x.ndim == 1:
        return half_from_interleaved_reference(x)
    return torch.cat([x[..., ::2, :], x[..., 1::2, :]], dim=-2)


EXERCISES = [quarter, precompute, rotary, permutation]
