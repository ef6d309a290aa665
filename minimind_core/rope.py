"""Rotary position embedding (RoPE), and YaRN, which stretches it to longer windows."""

import math
from typing import Any

import torch


def rope_frequencies(dim: int, rope_base: float = 1e6) -> torch.Tensor:
    """Angle per position, in radians, of each pair: rope_base^(-2i/dim), i = 0 .. dim/2 - 1.

    dim: head_dim, even. Returns [pairs], float32; pair 0 turns fastest, one radian per position.
    Source: Su et al. 2021, "RoFormer", equation 15.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"head_dim {dim} is odd or below 2; the rotary embedding turns pairs, so it must be even")
    return rope_base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_pair_index(turns: float, dim: int, rope_base: float, original_length: int) -> float:
    """The (fractional) pair that turns `turns` times within the original window: d(b).

    From wavelength 2 pi rope_base^(2 d / dim) = original_length / turns.
    Source: Peng et al. 2023, "YaRN", equations 13 and 17; solved for the pair in its reference code.
    """
    return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(rope_base))


def yarn_range(
    dim: int, rope_base: float, original_length: int, beta_fast: float = 32, beta_slow: float = 1
) -> tuple[int, int]:
    """(low, high): pairs below low keep their frequency, pairs above high are divided by the factor.

    Clamped to 0 .. dim - 1, as in the paper's code and Hugging Face (MiniMind clamps at dim/2 - 1, which differs
    for very long original windows). Raises ValueError for a reversed range.
    """
    low = max(math.floor(yarn_pair_index(beta_fast, dim, rope_base, original_length)), 0)
    high = min(math.ceil(yarn_pair_index(beta_slow, dim, rope_base, original_length)), dim - 1)
    if low > high:
        raise ValueError(
            f"the YaRN range is reversed: low {low} > high {high} (beta_fast {beta_fast}, beta_slow {beta_slow}, "
            f"original window {original_length}); beta_fast must be above beta_slow and the window long enough"
        )
    return low, high


def yarn_ramp(low: int, high: int, pairs: int) -> torch.Tensor:
    """clamp((i - low) / max(high - low, 0.001), 0, 1) for i = 0 .. pairs - 1: 0 is left alone, 1 is stretched."""
    return ((torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)


def yarn_attention_factor(factor: float) -> float:
    """0.1 ln(factor) + 1: the paper's multiplier of cos and sin (Peng et al. 2023, equation 22). 1 for factor <= 1."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def yarn_frequencies(frequencies: torch.Tensor, rope_base: float, scaling: dict[str, Any]) -> torch.Tensor:
    """Frequencies [pairs] after YaRN: old * (1 - ramp + ramp / factor)."""
    pairs = frequencies.shape[0]
    low, high = yarn_range(
        2 * pairs, rope_base, scaling["original_max_position_embeddings"], scaling["beta_fast"], scaling["beta_slow"]
    )
    ramp = yarn_ramp(low, high, pairs).to(frequencies.device)
    return frequencies * (1 - ramp + ramp / scaling["factor"])


def check_rope_scaling(rope_scaling: dict[str, Any]) -> dict[str, Any]:
    """The dictionary with defaults filled in: beta_fast 32, beta_slow 1, attention_factor 0.1 ln(factor) + 1.

    Accepts `type` or `rope_type`, which must be yarn. Raises ValueError for what is missing, unknown or impossible.
    """
    known = "type rope_type factor original_max_position_embeddings beta_fast beta_slow attention_factor".split()
    unknown = sorted(set(rope_scaling) - set(known))
    if unknown:
        raise ValueError(f"rope_scaling has unknown keys {unknown}; known are {known}")
    kind = rope_scaling.get("rope_type", rope_scaling.get("type", "yarn"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling is of type {kind!r}; only 'yarn' is built here")
    missing = [name for name in ("factor", "original_max_position_embeddings") if rope_scaling.get(name) is None]
    if missing:
        raise ValueError(f"rope_scaling lacks {missing}")
    scaling = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, **rope_scaling}
    if scaling["factor"] < 1:
        raise ValueError(f"rope_scaling has factor {scaling['factor']}; it stretches the window, so it is at least 1")
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        if not scaling[name] > 0:
            raise ValueError(f"rope_scaling has {name} {scaling[name]}; it must be above 0")
    if scaling["attention_factor"] is None:
        scaling["attention_factor"] = yarn_attention_factor(scaling["factor"])
    return scaling


def precompute_freqs_cis(
    dim: int, end: int = 32768, rope_base: float = 1e6, rope_scaling: dict[str, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables (cos, sin), each [end, head_dim] in float32: row = position, each half holds all pairs' angles.

    dim: head_dim; end: number of positions; rope_scaling: a YaRN dictionary, in force when
    end / original_max_position_embeddings > 1. It depends on the table's length, never on the prompt's.
    Source: MiniMind, precompute_freqs_cis.
    """
    frequencies, attention_factor = rope_frequencies(dim, rope_base), 1.0
    if rope_scaling is not None:
        scaling = check_rope_scaling(rope_scaling)
        if end > scaling["original_max_position_embeddings"]:
            frequencies = yarn_frequencies(frequencies, rope_base, scaling)
            attention_factor = scaling["attention_factor"]
    angles = torch.outer(torch.arange(end, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """[x1, x2] -> [-x2, x1] on the two halves of the last axis: a quarter turn of every pair (i, i + dim/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([-x2, x1], dim=-1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn each pair of q and k by its position's angle: x cos + rotate_half(x) sin.

    q: [batch, seq, heads, head_dim]; k: [batch, seq, kv_heads, head_dim]; cos, sin: [seq, head_dim], the rows of the
    positions of this call. unsqueeze_dim: where cos and sin get an axis for the heads (1 here; 0 for [batch, heads,
    seq, head_dim]). Arithmetic in the tables' float32; returns q and k in their own types.
    Raises ValueError if the tables do not have one row per position or differ in width from the heads.
    Source: Su et al. 2021, equation 34, in the half-split layout of GPT-NeoX.
    """
    positions, width = cos.shape
    for name, x in (("q", q), ("k", k)):
        found = (x.shape[-2 if unsqueeze_dim == 0 else -3], x.shape[-1])
        if found != (positions, width):
            raise ValueError(
                f"{name} has {found[0]} positions of width {found[1]}, but cos and sin have {positions} "
                f"of width {width}; slice the tables to the positions of this call"
            )
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_turned = q * cos + rotate_half(q) * sin
    k_turned = k * cos + rotate_half(k) * sin
    return q_turned.to(q.dtype), k_turned.to(k.dtype)
