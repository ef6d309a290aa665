"""What the explorer of the residual block draws, against stacks of the core's own blocks and plain arithmetic."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

import minimind_core as core
from minimind_core.explorers import residual_block

TOKENS, WIDTH = residual_block.TOKENS, residual_block.WIDTH


def stack(depth: int, scale: float) -> list[core.MiniMindBlock]:
    """The core's blocks with the explorer's weights, float64."""
    config = core.MiniMindConfig(
        hidden_size=WIDTH,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=residual_block.INSIDE,
        qk_norm=False,
        rms_norm_eps=1e-12,
    )
    blocks = [core.MiniMindBlock(i, config).double() for i in range(depth)]
    for block, (qkv, o, gate_up, down) in zip(blocks, residual_block.weights(scale), strict=False):
        parts = [block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj, block.self_attn.o_proj]
        parts += [block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj]
        for part, weight in zip(parts, (*qkv.chunk(3), o, *gate_up.chunk(2), down), strict=True):
            part.weight.data = weight.double()
    return blocks


def forward(block, placement: str, x: torch.Tensor, cancel: float) -> torch.Tensor:
    """One block, its norms where `placement` says, written from the core's parts."""
    unturned = torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH)  # cos and sin of no rotation at all
    norms = block.input_layernorm, block.post_attention_layernorm
    nothing = torch.nn.Identity()
    before = norms if placement == "pre-norm" else (nothing, nothing)
    after = norms if placement == "post-norm" else (nothing, nothing)
    x = after[0](x + block.self_attn(before[0](x), unturned)[0])
    return after[1](x + block.mlp(before[1](x)) - cancel * x)


def expected(placement: str, depth: int, scale: float, start: float, cancel: float):
    """rms of the stream, length of the gradient and rms of what is added, at each place."""
    entering, grad = (value.double() for value in residual_block.ends())
    places = [(start * entering)[None].requires_grad_()]
    for block in stack(depth, scale):
        places.append(forward(block, placement, places[-1], cancel))
        places[-1].retain_grad()
    places[-1].backward(grad[None])
    grads = [place.grad.norm().item() for place in places]
    rms = [math.sqrt((place.detach() ** 2).mean()) for place in places]
    added = [math.sqrt(((b - a).detach() ** 2).mean()) for a, b in pairwise(places)]
    return rms, grads, added


STATES = [
    ("pre-norm", 8, 1.0, 0.02, 0.0),
    ("pre-norm", 16, 4.0, 1.0, 0.0),
    ("pre-norm", 5, 0.25, 1.0, 0.9),
    ("post-norm", 12, 2.0, 1.0, 0.0),
    ("post-norm", 1, 1.0, 0.02, 1.0),
    ("no norm", 16, 1.0, 0.02, 0.0),
    ("no norm", 8, 0.25, 1.0, 0.5),
]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_numbers_are_those_of_the_cores_blocks(state):
    result = residual_block.compute(*state)
    rms, grads, added = expected(*state)
    chosen = result.numbers["chosen"]
    for shown, wanted, name in ((result.numbers["rms"][chosen], rms, 0), (result.numbers["grad"][chosen], grads, 1)):
        limits = residual_block.FLOORS[name], residual_block.CEILINGS[name]
        np.testing.assert_allclose(shown, np.clip(wanted, *limits), rtol=2e-3)
    np.testing.assert_allclose(result.numbers["added"], np.maximum(added, 1e-3), rtol=2e-3)
    assert f"{rms[0]:.2g} to {rms[-1]:.2g}" in result.sentence
    assert f"{grads[1]:.2g} reaches the first block's output and {grads[0]:.2g} the embedding" in result.sentence


def test_block_is_the_cores_own():
    block = stack(1, 1.0)[0]
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    unturned = torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH)
    torch.testing.assert_close(forward(block, "pre-norm", x, 0.0), block(x, unturned)[0])


def test_weights_have_the_scale_of_minimind():
    weights = residual_block.weights(1.0)
    for i in range(4):
        matrices = torch.stack([block[i] for block in weights])
        stretch = matrices.std().item() * math.sqrt(WIDTH)
        assert math.isclose(stretch, 0.02 * math.sqrt(768), rel_tol=0.02)


def test_cancelled_identity_is_a_power():
    numbers = residual_block.compute("no norm", 8, 0.25, 1.0, 0.9).numbers
    np.testing.assert_allclose(numbers["grad"][2], 0.1 ** np.arange(8, -1, -1.0), rtol=0.05)


def test_choosing_a_placement_changes_no_curve():
    one, other = (residual_block.compute(name, 8, 1.0, 0.02, 0.0).numbers for name in ("pre-norm", "post-norm"))
    np.testing.assert_array_equal(one["rms"], other["rms"])
    np.testing.assert_array_equal(one["grad"], other["grad"])


def test_overflow_is_said_and_drawn_at_the_edge():
    result = residual_block.compute("no norm", 16, 4.0, 1.0, 0.0)
    assert "overflows float32 in block" in result.sentence and "drawn at its edge" in result.sentence
    assert result.numbers["rms"][2].max() == residual_block.CEILINGS[0]
    assert result.numbers["lost"].tolist() == [False, False, True]


def test_nothing_is_said_of_an_edge_that_is_not_reached():
    assert "edge" not in residual_block.compute("pre-norm", 8, 1.0, 0.02, 0.0).sentence
