"""MiniMindConfig: presets, exact sizes, and errors that name the numbers."""

import dataclasses

import pytest
import torch
from reference import tiny_config

from minimind_core import MiniMindConfig, MiniMindForCausalLM, count_parameters


def on_meta(config: MiniMindConfig) -> MiniMindForCausalLM:
    """The model without memory: enough to count."""
    with torch.device("meta"):
        return MiniMindForCausalLM(config)


def test_minimind_3_counts():
    model = on_meta(MiniMindConfig())
    assert count_parameters(model) == (63_912_192, 63_912_192)
    assert sum(value.numel() for value in model.state_dict().values()) == 68_827_392  # the tied matrix counted twice
    layer = model.model.layers[0]
    assert count_parameters(layer.self_attn).total == 1_769_472 + 2 * 96
    assert count_parameters(layer.mlp).total == 5_603_328
    assert count_parameters(model.model.embed_tokens).total == 4_915_200


def test_minimind_3_moe_counts():
    assert count_parameters(on_meta(MiniMindConfig.minimind_3_moe())) == (198_416_640, 63_936_768)


@pytest.mark.parametrize(
    ("preset", "millions"), [("minimind_2_small", "25.83"), ("minimind_2", "104.03"), ("minimind_2_moe", "145.03")]
)
def test_minimind_2_counts(preset, millions):
    assert f"{count_parameters(on_meta(getattr(MiniMindConfig, preset)())).total / 1e6:.2f}" == millions


def test_active_leaves_out_the_experts_that_one_token_does_not_visit():
    config = tiny_config(use_moe=True, num_experts=5, num_experts_per_tok=2, n_shared_experts=1)
    total, active = count_parameters(on_meta(config))
    one_expert = 3 * config.hidden_size * config.moe_intermediate_size
    assert total - active == config.num_hidden_layers * (5 - 2) * one_expert


def test_defaults_are_the_table_of_minimind_3():
    wanted = {
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "vocab_size": 6400,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 96,
        "qk_norm": True,
        "intermediate_size": 2432,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "rms_norm_cast": "after_weight",
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "flash_attn": True,
        "dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_scaling": None,
        "use_moe": False,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "n_shared_experts": 0,
        "moe_intermediate_size": 2432,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 5e-4,
        "seq_aux": False,
        "router_gradient": "exact",
    }
    found = MiniMindConfig().to_dict()
    assert {name: found[name] for name in wanted} == wanted


def test_minimind_2_differs_where_the_table_says_so():
    config = MiniMindConfig.minimind_2()
    assert (config.num_hidden_layers, config.num_key_value_heads, config.intermediate_size) == (16, 2, 2048)
    assert (config.qk_norm, config.rms_norm_eps, config.rms_norm_cast) == (False, 1e-5, "before_weight")
    moe = MiniMindConfig.minimind_2_moe()
    assert (moe.hidden_size, moe.num_experts_per_tok, moe.n_shared_experts) == (640, 2, 1)
    assert (moe.router_aux_loss_coef, moe.seq_aux, moe.gate_init) == (0.01, True, "kaiming_uniform")


@pytest.mark.parametrize("preset", ["minimind_3", "minimind_3_moe", "minimind_2_small", "minimind_2", "minimind_2_moe"])
def test_presets_run(preset):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 64}
    config = getattr(MiniMindConfig, preset)(**small)
    ids = torch.arange(3, 15).view(2, 6)
    output = MiniMindForCausalLM(config).eval()(ids, labels=ids)
    assert output.logits.shape == (2, 6, 97)
    assert output.loss.isfinite()


def test_inference_rope_scaling_is_minimind_s_dictionary():
    config = MiniMindConfig(inference_rope_scaling=True)
    assert config.rope_scaling == {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.0,
    }
    assert config.replace(inference_rope_scaling=False).rope_scaling is None


def test_replace_derives_anew_but_keeps_what_was_given():
    assert MiniMindConfig().replace(hidden_size=512).head_dim == 64
    assert MiniMindConfig().replace(hidden_size=512).intermediate_size == 1664
    assert MiniMindConfig(head_dim=32).replace(hidden_size=512).head_dim == 32
    assert MiniMindConfig(intermediate_size=100).replace(hidden_size=512).moe_intermediate_size == 100


def test_to_dict_and_back():
    config = MiniMindConfig(inference_rope_scaling=True, use_moe=True, head_dim=64)
    assert MiniMindConfig(**config.to_dict()) == config


def test_frozen_and_not_shared():
    scaling = {"factor": 4, "original_max_position_embeddings": 2048}
    config = MiniMindConfig(rope_scaling=scaling)
    scaling["factor"] = 99
    assert config.rope_scaling["factor"] == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1


SCALING = {"factor": 4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"hidden_size": 100, "num_attention_heads": 8}, ["100", "8"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["6", "4"]),
        ({"head_dim": 15}, ["15", "odd"]),
        ({"hidden_size": 60, "num_attention_heads": 4, "num_key_value_heads": 4}, ["15", "odd"]),
        ({"hidden_act": "swish"}, ["swish", "silu"]),
        ({"num_experts": 2, "num_experts_per_tok": 3}, ["3", "2"]),
        ({"num_hidden_layers": 0}, ["0", "at least 1"]),
        ({"hidden_size": 64.0}, ["64.0", "whole number"]),
        ({"vocab_size": True}, ["True", "whole number"]),
        ({"n_shared_experts": -1}, ["-1"]),
        ({"dropout": 1.0}, ["1.0", "below 1"]),
        ({"dropout": float("nan")}, ["nan"]),
        ({"rope_theta": 0}, ["0", "above 0"]),
        ({"rms_norm_eps": 0.0}, ["0.0", "above 0"]),
        ({"router_aux_loss_coef": -1e-3}, ["-0.001"]),
        ({"eos_token_id": 97}, ["97", "97 tokens"]),
        ({"pad_token_id": -1}, ["-1", "97"]),
        ({"rms_norm_cast": "never"}, ["never", "before_weight"]),
        ({"router_gradient": "none"}, ["none", "straight_through"]),
        ({"gate_init": "zeros"}, ["zeros", "kaiming_uniform"]),
        ({"rope_scaling": {"factor": 4}}, ["original_max_position_embeddings"]),
        ({"rope_scaling": {**SCALING, "factor": 0.5}}, ["0.5", "at least 1"]),
        ({"rope_scaling": {**SCALING, "type": "linear"}}, ["linear", "yarn"]),
        ({"rope_scaling": {**SCALING, "beta_fast": 0}}, ["beta_fast", "0"]),
        ({"rope_scaling": {**SCALING, "rope_theta": 1e4}}, ["rope_theta"]),  # the config's own field counts
    ],
)
def test_impossible_values_are_refused_with_their_numbers(fields, numbers):
    with pytest.raises(ValueError) as error:
        tiny_config(**fields)
    assert all(number in str(error.value) for number in numbers), error.value


def test_unknown_field():
    with pytest.raises(TypeError, match="hidden_dim"):
        MiniMindConfig(hidden_dim=64)
    with pytest.raises(TypeError, match="hidden_dim"):
        MiniMindConfig().replace(hidden_dim=64)
