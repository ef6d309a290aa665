"""Grouped heads, masks, and the two paths of attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import largest_difference, random_ids, tiny_config, tiny_model

from minimind_core import (
    Attention,
    allowed_keys,
    attention_weights,
    causal_mask,
    precompute_freqs_cis,
    repeat_kv,
)

GENERATOR = torch.Generator().manual_seed(0)
Q = torch.randn(2, 5, 6, 8, generator=GENERATOR)
K, V = torch.randn(2, 2, 5, 2, 8, generator=GENERATOR)
PATHS = pytest.mark.parametrize("flash_attn", [True, False], ids=["fast", "explicit"])


def run(attention: Attention, x: torch.Tensor, attention_mask=None) -> torch.Tensor:
    tables = precompute_freqs_cis(attention.head_dim, x.shape[1], 1e6)
    return attention(x, tables, attention_mask=attention_mask)[0]


# ---------------------------------------------------------------- heads


def test_repeat_order():
    x = torch.arange(2.0).view(1, 1, 2, 1)
    assert repeat_kv(x, 3).flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert repeat_kv(x, 1) is x
    assert torch.equal(repeat_kv(K, 3), K.repeat_interleave(3, dim=2))


def test_explicit_path_equals_enable_gqa():
    weights = attention_weights(Q, repeat_kv(K, 3), allowed_keys(5, 5, None))
    ours = torch.einsum("bhqk,bkhd->bqhd", weights, repeat_kv(V, 3))
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert largest_difference(ours, wanted) < 1e-6
    tiled = attention_weights(Q, K.repeat(1, 1, 3, 1), allowed_keys(5, 5, None))
    assert largest_difference(tiled, weights) > 0.1


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_both_paths_give_the_same_numbers(kv_heads, qk_norm):
    fast, explicit = (
        tiny_model(num_key_value_heads=kv_heads, qk_norm=qk_norm, flash_attn=flash) for flash in (True, False)
    )
    mask = torch.ones(2, 12)
    mask[0, :4] = mask[1, 10:] = 0
    for attention_mask in (None, mask):
        outputs = [model(random_ids(), attention_mask, labels=random_ids()) for model in (fast, explicit)]
        for model, output in zip((fast, explicit), outputs, strict=True):
            model.zero_grad()
            output.loss.backward()
        assert largest_difference(outputs[0].logits, outputs[1].logits) < 1e-5
        for one, other in zip(fast.parameters(), explicit.parameters(), strict=True):
            assert largest_difference(one.grad, other.grad) < 1e-4


# ---------------------------------------------------------------- scores and weights


def test_weights_by_hand():
    q, k = torch.tensor([[[[2.0, 0.0]]]]), torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    weights = attention_weights(q, k, torch.ones(1, 1, 1, 2, dtype=torch.bool))
    first = 1 / (1 + math.exp(-2 / math.sqrt(2)))  # divided by sqrt(head_dim), head_dim = 2
    assert weights.flatten().tolist() == pytest.approx([first, 1 - first])


def test_weights_sum_to_one_over_the_allowed_keys():
    allowed = allowed_keys(5, 5, torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]))
    weights = attention_weights(Q, repeat_kv(K, 3), allowed)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 6, 5))
    assert (weights.masked_select(~allowed) == 0).all()


# ---------------------------------------------------------------- who may look at whom


def test_causal_mask_counts_cached_keys():
    assert causal_mask(2, 2).tolist() == [[True, False], [True, True]]
    assert causal_mask(2, 5).tolist() == [[True] * 4 + [False], [True] * 5]
    assert causal_mask(1, 4).all()


@PATHS
def test_the_future_does_not_matter(flash_attn):
    model, ids = tiny_model(flash_attn=flash_attn), random_ids()
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 90 + 3
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
        assert largest_difference(after[:, :7], before[:, :7]) < 1e-6
        assert largest_difference(after[:, 7:], before[:, 7:]) > 1e-2
        past = model(ids[:, :4], use_cache=True).past_key_values
        before, after = (model(x[:, 4:], past_key_values=past).logits for x in (ids, changed))
    assert largest_difference(after[:, :3], before[:, :3]) < 1e-6  # in the second chunk too


@PATHS
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32, torch.float16])
def test_left_padding_equals_no_padding(dtype, flash_attn):
    model, ids = tiny_model(flash_attn=flash_attn), random_ids(1, 8)
    padded = F.pad(ids, (4, 0))
    mask = (torch.arange(12) >= 4)[None].to(dtype)
    with torch.no_grad():
        wanted, found = model(ids).logits, model(padded, mask).logits[:, 4:]
        assert largest_difference(found, wanted) < 1e-5
        assert largest_difference(model(padded).logits[:, 4:], wanted) > 1e-2  # the mask is what helps


@PATHS
def test_right_padding_changes_nothing_before_it(flash_attn):
    model, ids = tiny_model(flash_attn=flash_attn), random_ids(1, 8)
    padded, mask = F.pad(ids, (0, 4)), (torch.arange(12) < 8)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        for attention_mask in (None, mask):
            assert largest_difference(model(padded, attention_mask).logits[:, :8], wanted) < 1e-5


@PATHS
@pytest.mark.parametrize("use_moe", [False, True], ids=["dense", "moe"])
def test_a_row_of_padding_is_finite_with_its_gradients(flash_attn, use_moe):
    model = tiny_model(flash_attn=flash_attn, use_moe=use_moe, num_experts_per_tok=2)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1] = False
    labels = random_ids()
    labels[1] = -100
    output = model(random_ids(), mask, labels=labels)
    (output.loss + output.aux_loss).backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    alone = model(random_ids()[:1]).logits
    assert largest_difference(output.logits[:1], alone) < 1e-5


def test_a_query_without_keys_sees_itself():
    mask = torch.tensor([[0, 0, 1, 1]])
    assert allowed_keys(4, 4, mask)[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert allowed_keys(2, 4, torch.zeros(1, 4))[0, 0].int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]


@PATHS
def test_block_diagonal_mask_stops_the_leak_between_packed_texts(flash_attn):
    model = tiny_model(flash_attn=flash_attn)
    first, second = random_ids(1, 5, seed=1), random_ids(1, 7, seed=2)
    packed, text = torch.cat([first, second], dim=1), torch.tensor([0] * 5 + [1] * 7)
    blocks = (text[:, None] == text[None, :])[None]
    with torch.no_grad():
        wanted = model(second).logits  # relative positions: where the second text starts does not matter
        assert largest_difference(model(packed, blocks).logits[:, 5:], wanted) < 1e-5
        assert largest_difference(model(packed).logits[:, 5:], wanted) > 1e-2


@PATHS
def test_per_query_mask_with_a_cache(flash_attn):
    model, ids = tiny_model(flash_attn=flash_attn), random_ids()
    window = causal_mask(12, 12) & ~causal_mask(12, 12).tril(-4)  # each position sees itself and three before
    window = window[None].expand(2, -1, -1)
    with torch.no_grad():
        wanted = model(ids, window).logits
        past = model(ids[:, :7], window[:, :7, :7], use_cache=True).past_key_values
        assert largest_difference(model(ids[:, 7:], window[:, 7:], past).logits, wanted[:, 7:]) < 1e-5


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((2, 11), r"\[2, 11\].*\[2, 12\]"),
        ((3, 12), r"\[3, 12\].*\[2, 12\]"),
        ((2, 5, 12), r"\[2, 5, 12\].*\[2, 12, 12\]"),
        ((12,), r"\[12\]"),
        ((2, 1, 12, 12), r"\[2, 1, 12, 12\]"),
    ],
)
def test_wrong_mask_shape(shape, found):
    with pytest.raises(ValueError, match=found):
        tiny_model()(random_ids(), torch.ones(shape))


def test_mask_must_count_the_cached_keys():
    model, ids = tiny_model(), random_ids()
    past = model(ids[:, :7], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"\[2, 5\].*\[2, 12\].*7 cached \+ 5 new"):
        model(ids[:, 7:], torch.ones(2, 5), past)
    with pytest.raises(ValueError, match=r"\[2, 5\].*7 cached \+ 5 new"):
        allowed_keys(5, 12, torch.ones(2, 5))


def test_additive_masks_are_refused_not_misread():
    additive = torch.zeros(2, 12)
    additive[:, :3] = -math.inf
    for call in (lambda: tiny_model()(random_ids(), additive), lambda: allowed_keys(12, 12, additive)):
        with pytest.raises(ValueError, match="-inf to 0"):
            call()


# ---------------------------------------------------------------- the module


def test_heads_may_be_wider_than_hidden_over_heads():
    attention = Attention(tiny_config(head_dim=24))
    assert attention.q_proj.weight.shape == (4 * 24, 64)
    assert attention.k_proj.weight.shape == (2 * 24, 64)
    assert run(attention, torch.randn(2, 5, 64)).shape == (2, 5, 64)


def test_qk_norm_is_there_and_used():
    names = [name for name, _ in Attention(tiny_config(qk_norm=False)).named_parameters()]
    assert not any("norm" in name for name in names)
    attention = Attention(tiny_config())
    x = torch.randn(1, 6, 64)
    before = run(attention, x)
    with torch.no_grad():
        attention.q_proj.weight.mul_(10)  # a norm on each head's q takes the factor out again
    assert largest_difference(run(attention, x), before) < 1e-3


@PATHS
def test_dropout_of_weights_and_output_in_training_only(flash_attn):
    attention = Attention(tiny_config(dropout=0.5, flash_attn=flash_attn))
    x = torch.randn(1, 6, 64)
    attention.eval()
    assert torch.equal(run(attention, x), run(attention, x))
    attention.train()
    assert (run(attention, x) == 0).float().mean() > 0.2  # resid_dropout
    attention.resid_dropout.p = 0.0
    assert not torch.equal(run(attention, x), run(attention, x))  # attn_dropout


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_types(dtype, flash_attn):
    model = tiny_model(flash_attn=flash_attn)
    wanted = model(random_ids()).logits
    found = model.to(dtype)(random_ids()).logits
    assert found.dtype == dtype
    limit = {torch.bfloat16: 0.1, torch.float16: 1e-2}.get(dtype, 1e-5)
    assert largest_difference(found, wanted) < limit
