"""The whole model against transformers' Qwen3 and Qwen3-MoE with the same weights."""

import pytest
import torch
from reference import as_transformers, gradients, largest_difference, random_ids, tiny_model, to_transformers

from minimind_core import FeedForward, MiniMindConfig

YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 4, "beta_slow": 1}
MOE = {"use_moe": True, "num_experts": 4, "moe_intermediate_size": 48}
VARIANTS = {
    "dense": {},
    "explicit attention": {"flash_attn": False},
    "head_dim 24, hidden / heads is 16": {"head_dim": 24},
    "untied": {"tie_word_embeddings": False},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query, gelu": {"num_key_value_heads": 1, "hidden_act": "gelu"},
    "yarn": {"rope_scaling": YARN},
    "yarn, attention_factor 1": {"rope_scaling": {**YARN, "attention_factor": 1.0}, "flash_attn": False},
    "moe, k = 1": {**MOE, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "moe, k = 2": {**MOE, "num_experts_per_tok": 2},
    "moe, k = 2, yarn, explicit": {**MOE, "num_experts_per_tok": 2, "rope_scaling": YARN, "flash_attn": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_every_gradient(variant):
    model = tiny_model(**VARIANTS[variant])
    theirs = to_transformers(model, attn_implementation="sdpa" if model.config.flash_attn else "eager")
    ids, labels = random_ids(seq=40), random_ids(seq=40, seed=1)
    labels[0, 25:] = -100
    ours, other = model(ids, labels=labels), theirs(input_ids=ids, labels=labels)
    assert largest_difference(ours.logits, other.logits) < 1e-5
    assert abs(ours.loss.item() - other.loss.item()) < 1e-5
    ours.loss.backward()
    other.loss.backward()
    mine, wanted = as_transformers(gradients(model), model.config), gradients(theirs)
    assert set(mine) == set(wanted)
    apart = {name: largest_difference(mine[name], wanted[name]) for name in wanted}
    assert max(apart.values()) < 1e-4, {name: value for name, value in apart.items() if value >= 1e-4}


@pytest.mark.parametrize("variant", ["dense", "explicit attention", "yarn", "moe, k = 2"])
def test_cached_logits_and_left_padding(variant):
    model = tiny_model(**VARIANTS[variant])
    ids, mask = random_ids(seq=12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    with torch.no_grad():
        wanted = to_transformers(model)(input_ids=ids, attention_mask=mask).logits
        first = model(ids[:, :7], mask[:, :7], use_cache=True)
        second = model(ids[:, 7:], mask, first.past_key_values, use_cache=True)
    ours = torch.cat([first.logits, second.logits], dim=1)
    assert largest_difference(ours[0], wanted[0]) < 1e-5
    assert largest_difference(ours[1, 5:], wanted[1, 5:]) < 1e-5  # outputs at padding mean nothing


def test_perturbed_weights_make_positions_and_heads_matter():
    """Were the reference insensitive to position or order, equality with it would prove little."""
    model, ids = tiny_model(), random_ids()
    logits = model(ids).logits
    swapped = ids.clone()
    swapped[:, :2] = ids[:, :2].flip(-1)
    assert largest_difference(model(swapped).logits[:, 5:], logits[:, 5:]) > 1e-2


def test_dense_names_are_qwen3s():
    ours = tiny_model().state_dict()
    theirs = to_transformers(tiny_model()).state_dict()
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}
    assert not any("freqs" in name for name in ours), "the rotary tables are not weights"


def test_feed_forward_is_qwen3s():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    ours = FeedForward(MiniMindConfig(hidden_size=64, intermediate_size=160))
    theirs = Qwen3MLP(Qwen3Config(hidden_size=64, intermediate_size=160, hidden_act="silu"))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    assert largest_difference(ours(x), theirs(x)) < 1e-6
