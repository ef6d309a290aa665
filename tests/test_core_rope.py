"""Rotary positions and YaRN: three properties, a complex-number reference, and transformers' frequencies."""

import math

import pytest
import torch
from reference import largest_difference, random_ids, tiny_model

from minimind_core import (
    apply_rotary_pos_emb,
    precompute_freqs_cis,
    rope_frequencies,
    rotate_half,
    yarn_attention_factor,
    yarn_frequencies,
    yarn_pair_index,
    yarn_ramp,
    yarn_range,
)

DIM, END = 16, 64
COS, SIN = precompute_freqs_cis(DIM, END, 1e4)
Q, K = torch.randn(2, 2, END, 3, DIM, generator=torch.Generator().manual_seed(0))
MINIMIND = {"factor": 16, "original_max_position_embeddings": 2048, "beta_fast": 32, "beta_slow": 1}


def turned(x: torch.Tensor, position: int, cos=COS, sin=SIN) -> torch.Tensor:
    rows = slice(position, position + 1)
    return apply_rotary_pos_emb(x, x, cos[rows], sin[rows])[0]


def test_frequencies_and_tables_by_hand():
    assert torch.allclose(rope_frequencies(4, 100.0), torch.tensor([1.0, 0.1]))
    cos, sin = precompute_freqs_cis(4, 3, 100.0)
    angles = torch.tensor([[0, 0, 0, 0], [1, 0.1, 1, 0.1], [2, 0.2, 2, 0.2]])
    assert torch.allclose(cos, angles.cos())
    assert torch.allclose(sin, angles.sin())
    assert cos.dtype == sin.dtype == torch.float32


def test_rotate_half_turns_the_halves():
    assert rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert torch.equal(rotate_half(rotate_half(Q)), -Q)


def test_norm_is_kept_and_position_0_does_nothing():
    q, k = apply_rotary_pos_emb(Q, K, COS, SIN)
    assert largest_difference(q.norm(dim=-1), Q.norm(dim=-1)) < 1e-6
    assert largest_difference(k.norm(dim=-1), K.norm(dim=-1)) < 1e-6
    assert torch.equal(q[:, 0], Q[:, 0])
    assert not torch.equal(q[:, 1], Q[:, 1])


def test_only_the_distance_matters():
    q, k = Q[:1, :1], K[:1, :1]
    scores = [(turned(q, i) * turned(k, i - 3)).sum(-1) for i in (3, 5, 13, 43)]
    for score in scores[1:]:
        assert (score - scores[0]).abs().max() < 1e-4
    assert ((turned(q, 5) * turned(k, 1)).sum(-1) - scores[0]).abs().max() > 1e-2
    half = DIM // 2
    mixed = [table[:, :half].repeat_interleave(2, -1) for table in (COS, SIN)]  # the table of the other layout
    wrong = [(turned(q, i, *mixed) * turned(k, i - 3, *mixed)).sum(-1) for i in (5, 43)]
    assert (wrong[0] - wrong[1]).abs().max() > 1e-2


def test_equals_complex_numbers_under_the_permutation():
    """Neighboring pairs (x0, x1) as complex numbers, times e^(i angle); our halves hold evens first, then odds."""
    frequencies = 1e4 ** -(torch.arange(0, DIM, 2).double() / DIM)
    turn = torch.polar(torch.ones(END, DIM // 2).double(), torch.outer(torch.arange(END).double(), frequencies))
    pairs = torch.view_as_complex(Q.double().unflatten(-1, (-1, 2)))
    interleaved = torch.view_as_real(pairs * turn[:, None]).flatten(-2)
    permutation = torch.cat([torch.arange(0, DIM, 2), torch.arange(1, DIM, 2)])
    ours, _ = apply_rotary_pos_emb(Q[..., permutation], K, COS, SIN)
    assert largest_difference(ours, interleaved[..., permutation]) < 1e-5


def test_axis_of_the_heads():
    wanted = apply_rotary_pos_emb(Q, K, COS, SIN)
    moved = apply_rotary_pos_emb(Q.transpose(1, 2), K.transpose(1, 2), COS, SIN, unsqueeze_dim=0)
    assert all(torch.equal(a.transpose(1, 2), b) for a, b in zip(moved, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types_are_kept_and_the_tables_stay_float32(dtype):
    q, k = apply_rotary_pos_emb(Q.to(dtype), K.to(dtype), COS, SIN)
    assert q.dtype == k.dtype == dtype
    wanted = apply_rotary_pos_emb(Q.to(dtype).double(), K.to(dtype).double(), COS, SIN)[0]
    assert torch.equal(q, wanted.float().to(dtype) if dtype != torch.float64 else wanted)  # one rounding


def test_far_positions_keep_their_angle():
    """Angles in bfloat16 would be off by radians: near 32768 its neighbors are 128 apart."""
    cos, _ = precompute_freqs_cis(96, 32768, 1e6)
    exact = (torch.arange(32768).double()[:, None] * 1e6 ** -(torch.arange(0, 96, 2).double() / 96)).cos()
    assert (cos[:, :48] - exact).abs().max() < 5e-3


@pytest.mark.parametrize("dim", [0, 1, 7])
def test_odd_width(dim):
    with pytest.raises(ValueError, match=f"head_dim {dim}"):
        rope_frequencies(dim)


def test_tables_of_another_length_or_width():
    with pytest.raises(ValueError, match=rf"{END} positions of width {DIM}.*{END - 1} of width {DIM}"):
        apply_rotary_pos_emb(Q, K, COS[1:], SIN[1:])
    with pytest.raises(ValueError, match=r"width 16.*width 8"):
        apply_rotary_pos_emb(Q, K, COS[:, :8], SIN[:, :8])
    with pytest.raises(ValueError, match="k has 3 positions"):
        apply_rotary_pos_emb(Q, K[:, :3], COS, SIN)


# ---------------------------------------------------------------- YaRN


@pytest.mark.parametrize("base", [1e4, 1e6])
@pytest.mark.parametrize("dim", [64, 96])
@pytest.mark.parametrize("scaling", [MINIMIND, {**MINIMIND, "factor": 4, "beta_fast": 8, "beta_slow": 2}])
@pytest.mark.parametrize("attention_factor", [None, 1.0, 1.5])
def test_yarn_equals_transformers(base, dim, scaling, attention_factor):
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**scaling, "attention_factor": attention_factor}
    rope = {"rope_theta": base, "rope_type": "yarn", **scaling}
    config = Qwen3Config(
        hidden_size=dim * 8, num_attention_heads=8, head_dim=dim, max_position_embeddings=32768, rope_parameters=rope
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    cos, sin = precompute_freqs_cis(dim, 32768, base, scaling)
    ours = torch.atan2(sin[1, : dim // 2], cos[1, : dim // 2])
    assert ((ours - wanted) / wanted).abs().max() < 1e-6
    assert cos[0].tolist() == pytest.approx([wanted_factor] * dim)


def test_fast_pairs_stay_and_slow_pairs_are_divided():
    old = rope_frequencies(96, 1e6)
    ratio = yarn_frequencies(old, 1e6, MINIMIND) / old
    low, high = yarn_range(96, 1e6, 2048)
    assert (low, high) == (8, 21)
    assert torch.equal(ratio[: low + 1], torch.ones(low + 1))
    assert torch.allclose(ratio[high:], torch.tensor(1 / 16))
    assert (ratio.diff() <= 1e-7).all()
    assert 1 / 16 < ratio[14] < 1


def test_pair_index_comes_from_the_wavelength():
    for turns in (1, 2.5, 32):
        index = yarn_pair_index(turns, 96, 1e6, 2048)
        wavelength = 2 * math.pi * 1e6 ** (2 * index / 96)
        assert wavelength == pytest.approx(2048 / turns)
    assert yarn_pair_index(32, 96, 1e6, 2048) == pytest.approx(8.06, abs=0.01)
    assert yarn_pair_index(1, 96, 1e6, 2048) == pytest.approx(20.11, abs=0.01)


def test_range_is_clamped_as_in_the_papers_code():
    assert yarn_range(16, 1e4, 2048)[0] >= 0
    assert yarn_range(16, 1e4, 64, beta_fast=64)[0] == 0
    assert yarn_range(64, 1e4, 10**6) == (29, 42)  # beyond the last pair, 31: clamped at dim - 1 only
    assert yarn_range(16, 1e4, 10**9, beta_fast=1e9)[1] == 15


def test_ramp():
    assert yarn_ramp(1, 3, 5).tolist() == [0, 0, 0.5, 1, 1]
    assert yarn_ramp(2, 2, 4).tolist() == [0, 0, 0, 1]  # an empty range is a step, not a division by zero


def test_attention_factor():
    assert yarn_attention_factor(16) == pytest.approx(1.2773, abs=1e-4)
    assert yarn_attention_factor(1) == yarn_attention_factor(0.5) == 1.0


def test_table_length_switches_yarn_on_not_the_prompt():
    plain = precompute_freqs_cis(96, 2048, 1e6)
    assert torch.equal(precompute_freqs_cis(96, 2048, 1e6, MINIMIND)[0], plain[0])
    longer = precompute_freqs_cis(96, 2049, 1e6, MINIMIND)[0]
    assert largest_difference(longer[:2048], plain[0]) > 0.1
    scaling = {"factor": 4, "original_max_position_embeddings": 32}
    short = random_ids(seq=8)  # far below the window of 32, and still different
    with_yarn = tiny_model(rope_scaling=scaling)(short).logits
    assert largest_difference(with_yarn, tiny_model()(short).logits) > 1e-3
    small = {"max_position_embeddings": 32}
    assert torch.equal(tiny_model(rope_scaling=scaling, **small)(short).logits, tiny_model(**small)(short).logits)


def test_either_spelling_of_the_type():
    tables = [precompute_freqs_cis(96, 4096, 1e6, {name: "yarn", **MINIMIND})[0] for name in ("type", "rope_type")]
    assert torch.equal(*tables)


def test_reversed_range_is_refused():
    with pytest.raises(ValueError, match=r"low 20 > high 9 \(beta_fast 1, beta_slow 32"):
        precompute_freqs_cis(96, 4096, 1e6, {**MINIMIND, "beta_fast": 1, "beta_slow": 32})
