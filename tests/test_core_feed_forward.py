"""SwiGLU: which branch is the gate, and the range of silu. Parity with Qwen3MLP: test_core_parity.py."""

import pytest
import torch
import torch.nn.functional as F
from reference import largest_difference, tiny_config

from minimind_core import FeedForward

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "function"), [("silu", F.silu), ("gelu", F.gelu), ("relu", F.relu)])
def test_formula(name, function):
    part = FeedForward(tiny_config(hidden_act=name))
    gate, up, down = (layer.weight for layer in (part.gate_proj, part.up_proj, part.down_proj))
    wanted = (function(X @ gate.T) * (X @ up.T)) @ down.T
    assert largest_difference(part(X), wanted) < 1e-5
    swapped = ((X @ gate.T) * function(X @ up.T)) @ down.T
    assert largest_difference(part(X), swapped) > 0.05


def test_width_and_no_biases():
    assert FeedForward(tiny_config()).down_proj.weight.shape == (64, 96)
    assert FeedForward(tiny_config(), 40).down_proj.weight.shape == (64, 40)
    assert all("bias" not in name for name, _ in FeedForward(tiny_config()).named_parameters())


def test_silu_has_a_minimum():
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    y = F.silu(x)
    assert y.min().item() == pytest.approx(-0.27846, abs=1e-5)
    assert x[y.argmin()].item() == pytest.approx(-1.27846, abs=1e-3)


def test_the_gate_is_not_the_value():
    assert F.silu(torch.tensor(1.0)).item() * 2 == pytest.approx(1.462, abs=1e-3)
    assert F.silu(torch.tensor(2.0)).item() * 1 == pytest.approx(1.762, abs=1e-3)
    part = FeedForward(tiny_config(hidden_size=1, num_attention_heads=1, num_key_value_heads=1, head_dim=2), 1)
    with torch.no_grad():
        for layer, value in ((part.gate_proj, 1.0), (part.up_proj, 2.0), (part.down_proj, 1.0)):
            layer.weight.fill_(value)
    assert part(torch.ones(1)).item() == pytest.approx(1.462, abs=1e-3)
