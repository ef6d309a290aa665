"""Exercises of notebook 03: which pairs turn how often, the ramp, the new frequencies, the attention factor."""

import math

import torch

from ..rope import rope_frequencies, yarn_attention_factor, yarn_pair_index, yarn_ramp
from ..rope import yarn_frequencies as core_frequencies
from .framework import Exercise, case

# 1. pair_index -------------------------------------------------------------------------------------------------------


def pair_index_reference(turns, head_dim, rope_base, original_length):
    """The (fractional) pair that turns `turns` times within the original window: i(beta)."""
    return yarn_pair_index(turns, head_dim, rope_base, original_length)


index = Exercise(
    name="03_yarn.pair_index",
    title="Which pair turns beta times within the trained window",
    signature="pair_index(turns, head_dim, rope_base, original_length)",
    reference=pair_index_reference,
    cases=[
        case("one turn, four pairs, base 100, a window of 63", 1, 8, 100.0, 63),
        case("MiniMind-3, beta_slow", 1, 96, 1e6, 2048),
        case("MiniMind-3, beta_fast", 32, 96, 1e6, 2048),
        case("half a turn, another base and window", 0.5, 128, 5e5, 8192),
    ],
)


@index.mutant(
    "2 pi is missing: the wavelength was taken as 1 / frequency",
    "a pair with frequency f needs 2 pi / f positions for one turn, 1 / f for one radian.",
)
def no_two_pi(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, head_dim, rope_base, original_length * 2 * math.pi)


@index.mutant(
    "the 2 in front of ln(base) is missing",
    "the exponent of pair i is 2i / head_dim. Without the 2 the result counts features, not pairs, up to head_dim.",
)
def two_missing(turns, head_dim, rope_base, original_length):
    return 2 * pair_index_reference(turns, head_dim, rope_base, original_length)


@index.mutant(
    "the number of turns is multiplied, not divided by",
    "more turns mean a shorter wavelength, length / turns, and so an earlier pair.",
)
def turns_multiplied(turns, head_dim, rope_base, original_length):
    return pair_index_reference(1 / turns, head_dim, rope_base, original_length)


@index.mutant("the number of turns is not used", "then beta_fast and beta_slow would mark the same pair.")
def turns_ignored(turns, head_dim, rope_base, original_length):
    return pair_index_reference(1, head_dim, rope_base, original_length)


@index.mutant(
    "the sign is wrong: the logarithm is of 2 pi beta / length",
    "the result is negative. Long wavelengths belong to large pair numbers.",
)
def inverted(turns, head_dim, rope_base, original_length):
    return -pair_index_reference(turns, head_dim, rope_base, original_length)


@index.mutant(
    "ln(base) is missing",
    "base^x = y is solved by x = ln y / ln base. Without the division this is the answer for base e.",
)
def no_log_base(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, head_dim, math.e, original_length)


@index.mutant("head_dim is missing", "the result is then a share of head_dim (0 to 1/2), not the number of a pair.")
def no_head_dim(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, 1, rope_base, original_length)


@index.mutant(
    "the logarithm of the numerator is to another base than the one below",
    "the two may have any base, but both the same: math.log in both places.",
)
def mixed_logarithms(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, head_dim, rope_base, original_length) / math.log(10)


@index.mutant(
    "brackets are missing around 2 pi turns",
    "a / 2 * pi is (a / 2) * pi: Python goes from left to right. Write length / (2 * math.pi * turns).",
)
def no_brackets_below(turns, head_dim, rope_base, original_length):
    return head_dim * math.log(original_length / 2 * math.pi * turns) / (2 * math.log(rope_base))


@index.mutant(
    "brackets are missing around 2 pi, and only the 2 divides",
    "a / 2 * pi is (a / 2) * pi: Python goes from left to right. Write length / (2 * math.pi * turns).",
)
def pi_multiplied(turns, head_dim, rope_base, original_length):
    return head_dim * math.log(original_length / 2 * math.pi / turns) / (2 * math.log(rope_base))


@index.mutant(
    "brackets are missing around 2 ln(base)",
    "a / 2 * b is (a / 2) * b: Python goes from left to right. Write a / (2 * b).",
)
def base_multiplied(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, head_dim, rope_base, original_length) * math.log(rope_base) ** 2


@index.mutant("the result is rounded up to a whole pair", "i(beta) lies between two pairs; rounding comes later.")
def rounded_up(turns, head_dim, rope_base, original_length):
    return math.ceil(pair_index_reference(turns, head_dim, rope_base, original_length))


@index.mutant(
    "the base is a million, and not the argument rope_base",
    "`base` is a name from further up in the notebook. A function works with its own arguments.",
)
def notebooks_base(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, head_dim, 1e6, original_length)


@index.mutant(
    "the window is 2048, and not the argument original_length",
    "`length` is a name from further up in the notebook. A function works with its own arguments.",
)
def notebooks_length(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, head_dim, rope_base, 2048)


@index.mutant("the base is 10000 in the code, and not the argument", "MiniMind-3 uses a million.")
def index_fixed_base(turns, head_dim, rope_base, original_length):
    return pair_index_reference(turns, head_dim, 1e4, original_length)


@index.mutant(
    "the result is rounded",
    "rounding comes later, downwards for low and upwards for high: i(beta) itself lies between two pairs.",
)
def rounded(turns, head_dim, rope_base, original_length):
    return round(pair_index_reference(turns, head_dim, rope_base, original_length))


# 2. ramp -------------------------------------------------------------------------------------------------------------


def ramp_reference(low, high, pairs):
    """[pairs]: 0 up to pair low, 1 from pair high on, a straight line in between."""
    return yarn_ramp(low, high, pairs)


def pair_numbers(pairs: int) -> torch.Tensor:
    return torch.arange(pairs, dtype=torch.float32)


ramp = Exercise(
    name="03_yarn.ramp",
    title="The ramp: 0 for pairs that stay, 1 for pairs that are stretched",
    signature="ramp(low, high, pairs)",
    reference=ramp_reference,
    cases=[
        case("from pair 1 to pair 3 of five", 1, 3, 5),
        case("low = high: a step", 2, 2, 5),
        case("from pair 0 to beyond the last", 0, 7, 6),
        case("MiniMind-3: from 8 to 21 of 48", 8, 21, 48),
    ],
)


def unclamped(low, high, pairs):
    return (pair_numbers(pairs) - low) / max(high - low, 0.001)


@ramp.mutant(
    "the ramp is reversed: 1 for fast pairs, 0 for slow ones",
    "fast pairs have made all their turns in training and must be left alone (0); slow ones are stretched (1).",
    "Hugging Face and the paper's code keep this mirror image too, as the share that stays: 1 - ramp.",
)
def reversed_ramp(low, high, pairs):
    return 1 - ramp_reference(low, high, pairs)


@ramp.mutant(
    "the clamp is missing",
    "pairs below low get a negative ramp and turn faster than before; pairs above high get more than 1.",
)
def no_clamp(low, high, pairs):
    return unclamped(low, high, pairs)


@ramp.mutant("only the lower end is clamped", "pairs above high get more than 1, and soon a negative frequency.")
def clamped_below(low, high, pairs):
    return unclamped(low, high, pairs).clamp(min=0)


@ramp.mutant("only the upper end is clamped", "pairs below low get a negative ramp, and turn faster than before.")
def clamped_above(low, high, pairs):
    return unclamped(low, high, pairs).clamp(max=1)


@ramp.mutant(
    "there is no guard for low = high",
    "0 / 0 = NaN at that pair. max(high - low, 0.001) keeps the division finite.",
)
def no_guard(low, high, pairs):
    return ((pair_numbers(pairs) - low) / torch.tensor(float(high - low))).clamp(0, 1)


@ramp.mutant("low is not subtracted", "the ramp must start at low; this one starts at pair 0.")
def from_zero(low, high, pairs):
    return (pair_numbers(pairs) / max(high - low, 0.001)).clamp(0, 1)


@ramp.mutant("the difference is divided by high, not by high - low", "the ramp must reach 1 at pair high.")
def divided_by_high(low, high, pairs):
    return ((pair_numbers(pairs) - low) / max(high, 0.001)).clamp(0, 1)


@ramp.mutant(
    "it is a step at low, not a ramp",
    "neighboring pairs would be treated in two ways. Between low and high the ramp rises in a straight line.",
)
def step(low, high, pairs):
    return (pair_numbers(pairs) > low).float()


@ramp.mutant("pairs count from 1", "pair 0 is the fastest: torch.arange(pairs).")
def ramp_from_one(low, high, pairs):
    return ((pair_numbers(pairs) + 1 - low) / max(high - low, 0.001)).clamp(0, 1)


@ramp.mutant(
    "brackets are missing around i - low: only low is divided",
    "a - b / c is a - (b / c). Subtract first: the line is 0 at low.",
)
def only_low_divided(low, high, pairs):
    return (pair_numbers(pairs) - low / max(high - low, 0.001)).clamp(0, 1)


@ramp.mutant(
    "it is clamped before it is divided",
    "the line is then cut at one pair after low. Divide by high - low first, then clamp.",
)
def clamped_early(low, high, pairs):
    return (pair_numbers(pairs) - low).clamp(0, 1) / max(high - low, 0.001)


@ramp.mutant(
    "0.001 is added to high - low, always",
    "all values between are a little too small. It is a lower limit, max(high - low, 0.001), for low = high only.",
)
def guard_added(low, high, pairs):
    return ((pair_numbers(pairs) - low) / (high - low + 0.001)).clamp(0, 1)


@ramp.mutant("it rises from the first pair to the last", "it must be 0 up to low, and 1 from high on.")
def over_all_pairs(low, high, pairs):
    return torch.linspace(0, 1, pairs)


@ramp.mutant("low and high are swapped", "high - low is then negative, and the guard makes it a cliff at high.")
def swapped_ends(low, high, pairs):
    return ((pair_numbers(pairs) - high) / max(low - high, 0.001)).clamp(0, 1)


# 3. yarn_frequencies -------------------------------------------------------------------------------------------------


def frequencies_reference(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    """The frequencies [pairs] after YaRN."""
    scaling = dict(factor=factor, original_max_position_embeddings=original_length)
    return core_frequencies(frequencies, rope_base, {**scaling, "beta_fast": beta_fast, "beta_slow": beta_slow})


def yarn_case(label, head_dim, rope_base, factor, original_length, beta_fast=32, beta_slow=1):
    return case(label, rope_frequencies(head_dim, rope_base), rope_base, factor, original_length, beta_fast, beta_slow)


def blend(frequencies, ramp, factor):
    return frequencies * (1 - ramp + ramp / factor)


def ends(frequencies, rope_base, original_length, beta_fast, beta_slow) -> tuple[float, float]:
    """i(beta_fast) and i(beta_slow), before rounding and clamping."""
    head_dim = 2 * frequencies.shape[0]
    return tuple(yarn_pair_index(beta, head_dim, rope_base, original_length) for beta in (beta_fast, beta_slow))


def notebook_ramp(frequencies, rope_base, original_length, beta_fast, beta_slow) -> torch.Tensor:
    """Steps 3 and 4 of the notebook, done right: [pairs]."""
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    return ramp_reference(max(math.floor(low), 0), min(math.ceil(high), 2 * pairs - 1), pairs)


yarn = Exercise(
    name="03_yarn.yarn_frequencies",
    title="YaRN: the new frequency of every pair",
    signature="yarn_frequencies(frequencies, rope_base, factor, original_length, beta_fast, beta_slow)",
    reference=frequencies_reference,
    returns=("frequencies",),
    provides={"pair_index": pair_index_reference, "ramp": ramp_reference},
    cases=[
        yarn_case("four pairs, base 100, window 63, factor 4", 8, 100.0, 4, 63, 8, 1),
        yarn_case("a short window, where low would be negative", 16, 1e4, 8, 64),
        yarn_case("a long window, where high is beyond the last pair", 16, 100.0, 2, 2048),
        yarn_case("a window so long that high passes head_dim - 1", 16, 10.0, 2, 4096, 640, 1),
        yarn_case("MiniMind-3", 96, 1e6, 16, 2048),
        yarn_case("Qwen3, where low and high round the other way", 128, 1e6, 4, 32768),
        yarn_case("other betas", 96, 1e6, 4, 32768, 16, 2),
    ],
)


@yarn.mutant(
    "the ramp is reversed: fast pairs are slowed down, slow pairs are left alone",
    "fast pairs tell neighbors apart and have seen every angle; it is the slow ones that would reach unseen angles.",
)
def wrong_end(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    new = frequencies_reference(frequencies, rope_base, factor, original_length, beta_fast, beta_slow)
    return frequencies + frequencies / factor - new


@yarn.mutant(
    "every pair is divided by the factor",
    "neighboring tokens then differ by a fraction of the angle that the model knows, and it loses its sense of order.",
    "this is position interpolation (Chen and others, 2023), which needs training afterwards.",
)
def position_interpolation(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    return frequencies / factor


@yarn.mutant(
    "the base was raised, and all pairs changed by a power",
    "the first pair stays and the last is divided by the factor, as they should be; but in between some are changed "
    "that should stay, and slow ones are stretched too little and reach unseen angles.",
    "this is NTK-aware scaling, the step between position interpolation and YaRN.",
)
def ntk_aware(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    head_dim = 2 * frequencies.shape[0]
    return rope_frequencies(head_dim, rope_base * factor ** (head_dim / (head_dim - 2)))


@yarn.mutant(
    "every pair is multiplied by the factor",
    "a longer window needs slower turns, and of the slow pairs only.",
)
def all_faster(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    return frequencies * factor


@yarn.mutant("nothing changed", "positions beyond the window then reach angles that the slow pairs never saw.")
def no_yarn(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    return frequencies.clone()


@yarn.mutant(
    "the slow pairs are multiplied by the factor, not divided",
    "they would turn even faster through angles never seen. A longer window needs slower turns.",
)
def factor_multiplied(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    return frequencies_reference(frequencies, rope_base, 1 / factor, original_length, beta_fast, beta_slow)


@yarn.mutant(
    "low and high were not rounded",
    "the paper's code rounds low down and high up, so that the ramp begins and ends on a pair.",
    "Hugging Face does so with truncate=False.",
)
def not_rounded(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    return blend(frequencies, ramp_reference(max(low, 0), min(high, 2 * pairs - 1), pairs), factor)


@yarn.mutant(
    "floor and ceil are swapped: low was rounded up and high down",
    "the ramp is then steeper than the paper's. It reaches outwards: low down, high up.",
)
def rounded_inwards(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    low, high = max(math.ceil(low), 0), min(math.floor(high), 2 * pairs - 1)
    return blend(frequencies, ramp_reference(low, high, pairs), factor)


@yarn.mutant(
    "low and high were rounded to the nearest whole number",
    "the ramp reaches outwards: low is rounded down (floor), high up (ceil).",
)
def rounded_to_nearest(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    return blend(frequencies, ramp_reference(max(round(low), 0), min(round(high), 2 * pairs - 1), pairs), factor)


@yarn.mutant(
    "high was rounded down, as int() and floor do",
    "the ramp must end on the pair after i(beta_slow), not before it: high is rounded up (ceil).",
)
def both_rounded_down(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    low, high = max(math.floor(low), 0), min(math.floor(high), 2 * frequencies.shape[0] - 1)
    return blend(frequencies, ramp_reference(low, high, frequencies.shape[0]), factor)


@yarn.mutant(
    "low and high are not clamped to 0 and head_dim - 1",
    "for short windows low is negative, and the ramp has begun before the first pair.",
)
def range_not_clamped(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    return blend(frequencies, ramp_reference(math.floor(low), math.ceil(high), frequencies.shape[0]), factor)


@yarn.mutant(
    "low is not clamped at 0",
    "for short windows low is negative, and the ramp has begun before the first pair. max(low, 0) stops that.",
)
def low_not_clamped(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    return blend(frequencies, ramp_reference(math.floor(low), min(math.ceil(high), 2 * pairs - 1), pairs), factor)


@yarn.mutant(
    "high is not clamped at head_dim - 1", "step 3 asks for min(high, head_dim - 1); very long windows show it."
)
def high_not_clamped(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    return blend(frequencies, ramp_reference(max(math.floor(low), 0), math.ceil(high), frequencies.shape[0]), factor)


@yarn.mutant(
    "head_dim was taken as the number of pairs",
    "each pair holds two numbers: head_dim = 2 * frequencies.shape[0].",
)
def head_dim_is_pairs(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    pairs = frequencies.shape[0]
    low, high = (yarn_pair_index(beta, pairs, rope_base, original_length) for beta in (beta_fast, beta_slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), pairs - 1)
    return blend(frequencies, ramp_reference(low, high, pairs), factor)


@yarn.mutant(
    "the result is new / old, the share of each frequency, and not the frequency itself",
    "multiply 1 - ramp + ramp / factor by the old frequencies.",
)
def share_only(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    return frequencies_reference(frequencies, rope_base, factor, original_length, beta_fast, beta_slow) / frequencies


@yarn.mutant(
    "ramp / factor is added without its frequency",
    "both parts belong to the pair: frequencies * (1 - ramp + ramp / factor), with brackets.",
)
def second_part_bare(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    ramp_ = notebook_ramp(frequencies, rope_base, original_length, beta_fast, beta_slow)
    return frequencies * (1 - ramp_) + ramp_ / factor


@yarn.mutant(
    "the 1 - ramp belongs to the old frequency, but stands here without it",
    "both parts belong to the pair: frequencies * (1 - ramp + ramp / factor), with brackets.",
)
def first_part_bare(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    ramp_ = notebook_ramp(frequencies, rope_base, original_length, beta_fast, beta_slow)
    return 1 - ramp_ + ramp_ / factor * frequencies


@yarn.mutant(
    "the result is frequency * (1 - ramp / factor)",
    "two parts are added: 1 - ramp of the old frequency, and ramp of the old frequency / factor.",
)
def one_minus_part(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    return frequencies * (1 - notebook_ramp(frequencies, rope_base, original_length, beta_fast, beta_slow) / factor)


@yarn.mutant(
    "the factor is 16, and not the argument factor",
    "16 is MiniMind's. A function works with its own arguments.",
)
def factor_16(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    return frequencies_reference(frequencies, rope_base, 16, original_length, beta_fast, beta_slow)


@yarn.mutant(
    "the frequencies are multiplied by the attention factor",
    "it multiplies the cosines and sines (exercise 4). A frequency times 1.28 is a faster turn.",
)
def attention_in_frequencies(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    new = frequencies_reference(frequencies, rope_base, factor, original_length, beta_fast, beta_slow)
    return yarn_attention_factor(factor) * new


@yarn.mutant(
    "the ramp runs over turns, not over pair numbers",
    "step 4 counts pairs: (i - low) / (high - low).",
    "this is the paper's equation 18, and Llama-3's way.",
)
def ramp_over_turns(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    turns = original_length * frequencies / (2 * math.pi)
    return blend(frequencies, ((beta_fast - turns) / (beta_fast - beta_slow)).clamp(0, 1), factor)


@yarn.mutant(
    "high is clamped at the last pair, not at head_dim - 1",
    "it differs for long windows only: the last pair is then stretched in full, though it turns more than once.",
    "MiniMind does this. The paper's code and Hugging Face clamp at head_dim - 1.",
)
def clamped_at_last_pair(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    low, high = max(math.floor(low), 0), min(math.ceil(high), pairs - 1)
    return blend(frequencies, ramp_reference(low, high, pairs), factor)


@yarn.mutant(
    "beta_fast and beta_slow are swapped",
    "more turns mean a faster, earlier pair: low comes from beta_fast, high from beta_slow.",
)
def betas_swapped(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_slow, beta_fast)
    pairs = frequencies.shape[0]
    low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * pairs - 1)
    return blend(frequencies, ramp_reference(low, high, pairs), factor)


@yarn.mutant(
    "2 pi is missing in i(beta)",
    "a pair with frequency f needs 2 pi / f positions for one turn.",
)
def yarn_no_two_pi(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length * 2 * math.pi, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    low, high = max(math.floor(low), 0), min(math.ceil(high), 2 * pairs - 1)
    return blend(frequencies, ramp_reference(low, high, pairs), factor)


@yarn.mutant(
    "the wavelengths were blended, not the frequencies",
    "a mean of wavelengths is not the wavelength of the mean. YaRN blends f and f / factor.",
)
def blended_wavelengths(frequencies, rope_base, factor, original_length, beta_fast, beta_slow):
    low, high = ends(frequencies, rope_base, original_length, beta_fast, beta_slow)
    pairs = frequencies.shape[0]
    ramp_ = ramp_reference(max(math.floor(low), 0), min(math.ceil(high), 2 * pairs - 1), pairs)
    return frequencies / (1 - ramp_ + ramp_ * factor)


# 4. attention_factor -------------------------------------------------------------------------------------------------


def attention_factor_reference(factor):
    """0.1 ln(factor) + 1: cos and sin are multiplied by it. 1 for factor <= 1."""
    return yarn_attention_factor(factor)


attention = Exercise(
    name="03_yarn.attention_factor",
    title="The number that cos and sin are multiplied by",
    signature="attention_factor(factor)",
    reference=attention_factor_reference,
    returns=("factor",),
    cases=[
        case("no stretching", 1),
        case("twice as long", 2),
        case("MiniMind-3: 16 times as long", 16),
        case("shorter than the window", 0.5),
    ],
)


@attention.mutant("the logarithm is to base 10", "the paper's fit uses the natural logarithm: math.log.")
def factor_base_ten(factor):
    return 0.1 * math.log10(factor) + 1 if factor > 1 else 1.0


@attention.mutant("the logarithm is to base 2", "the paper's fit uses the natural logarithm: math.log.")
def factor_base_two(factor):
    return 0.1 * math.log2(factor) + 1 if factor > 1 else 1.0


@attention.mutant(
    "it is squared already",
    "cos and sin turn up in q and in k, so a score gets the square anyhow: squared here, it is squared twice.",
)
def squared(factor):
    return attention_factor_reference(factor) ** 2


@attention.mutant(
    "it is the inverse",
    "the paper writes sqrt(1 / t) = 0.1 ln s + 1: that root is the multiplier. The scores are to grow, not to shrink.",
)
def inverse(factor):
    return 1 / attention_factor_reference(factor)


@attention.mutant(
    "it is always 1",
    "the more keys there are, the flatter softmax gets; the factor sharpens it again.",
    "MiniMind's presets say attention_factor 1.0, which switches it off.",
)
def always_one(factor):
    return 1.0


@attention.mutant("the 1 is missing", "at factor 1 nothing may change, and ln(1) = 0.")
def one_missing(factor):
    return 0.1 * math.log(factor) if factor > 1 else 0.0


@attention.mutant("the 0.1 is missing", "the scores would be 14 times as large at factor 16: softmax picks one key.")
def tenth_missing(factor):
    return math.log(factor) + 1 if factor > 1 else 1.0


@attention.mutant(
    "a factor below 1 is not caught",
    "a window that is not stretched needs no sharpening: 1 for every factor <= 1.",
)
def below_one(factor):
    return 0.1 * math.log(factor) + 1


@attention.mutant("the result is rounded", "1.2773 is rounded for reading only. Return the number as it comes out.")
def factor_rounded(factor):
    return round(attention_factor_reference(factor), 4)


@attention.mutant("the 1 stands inside the logarithm", "0.1 ln(s) + 1: first the logarithm of s, then the 1.")
def one_inside(factor):
    return 0.1 * math.log(factor + 1)


@attention.mutant("it is 1.2773 for every factor", "that is the value for factor 16. Work it out from the argument.")
def fixed_factor(factor):
    return 1.2773


@attention.mutant("without stretching it is 0", "cos and sin would become 0 and every position look alike: return 1.")
def zero_without_stretching(factor):
    return 0.1 * math.log(factor) + 1 if factor > 1 else 0.0


@attention.mutant("the root of the factor is taken", "the fit in the paper is logarithmic: it grows very slowly.")
def root(factor):
    return math.sqrt(factor) if factor > 1 else 1.0


EXERCISES = [index, ramp, yarn, attention]
