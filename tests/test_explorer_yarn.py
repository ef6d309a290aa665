"""What the ramp visualizer draws beside YaRN: Llama-3's formula, NTK-aware scaling, and the count of unseen angles."""

import math

import numpy as np
import pytest
import torch

from minimind_core import rope_frequencies
from minimind_core.explorers import yarn


def of(**settings) -> dict:
    """The numbers of the default state with some settings changed."""
    defaults = {key: control.default for key, control in yarn.CONTROLS.items()}
    return yarn.compute(**(defaults | settings)).numbers


def test_llama3_equals_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=rope)
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    ours = yarn.llama3_frequencies(rope_frequencies(128, 5e5), 8, 8192, 1, 4)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=0)
    assert attention_factor == 1
    drawn = of(**yarn.PRESETS["Llama-3 style"])["frequency Llama-3"]
    assert np.allclose(drawn, theirs.numpy(), rtol=1e-5, atol=0)


def test_llama3_refuses_a_reversed_range():
    with pytest.raises(ValueError, match="high_freq_factor 1 must be above low_freq_factor 4"):
        yarn.llama3_frequencies(rope_frequencies(96), 8, 8192, 4, 1)


def test_ntk_aware_keeps_the_first_pair_and_divides_the_last():
    before, after = rope_frequencies(96), yarn.ntk_aware_frequencies(96, 1e6, 16)
    ratio = (before / after).tolist()
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(16, rel=1e-4)
    assert ratio == sorted(ratio)


def test_unseen_angles_counted_position_by_position():
    """Small enough to visit every position: is some later angle farther from all trained ones than one step?"""
    length, factor = 64, 4
    before = rope_frequencies(32, 1e4).double()
    for after in (before, before / factor, yarn.ntk_aware_frequencies(32, 1e4, factor).double()):
        wanted = []
        for old, new in zip(before, after, strict=True):
            trained = (torch.arange(length) * old) % math.tau
            later = (torch.arange(factor * length) * new) % math.tau
            apart = (later[:, None] - trained[None, :]).abs()
            nearest = torch.minimum(apart, math.tau - apart).amin(dim=1)
            wanted.append((nearest.max() > old).item())
        assert yarn.unseen_pairs(before, after, length, factor).tolist() == wanted


def test_counts_of_the_default_state():
    numbers = of()
    assert (numbers["low"], numbers["high"], numbers["pairs"]) == (8, 21, 48)
    counts = {name: numbers[f"unseen {name}"] for name in yarn.METHODS}
    assert counts == {"unscaled": 27, "PI": 0, "NTK": 26, "YaRN": 0, "Llama-3": 0}
    assert of(beta_slow=0.25)["unseen YaRN"] == 4  # pairs below one turn, but only blended


def test_a_reversed_range_is_said_and_not_drawn():
    explorer = yarn.explore(beta_fast=1.0, beta_slow=32.0)
    assert "low 20 > high 9" in explorer.sentence and explorer.sentence.startswith("Refused")
    assert explorer.result.numbers["ramp YaRN"].size == explorer.result.numbers["frequency YaRN"].size == 0
    assert explorer.scene["refused"].get_text() and not len(explorer.scene["ratio YaRN"].get_xdata())
    explorer.reset()
    assert not explorer.scene["refused"].get_text() and len(explorer.scene["ratio YaRN"].get_xdata()) == 48
