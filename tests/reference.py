"""The core's weights in transformers' Qwen3 and Qwen3-MoE, and the small models that the core's tests share."""

from __future__ import annotations

import torch

from minimind_core import MiniMindConfig, MiniMindForCausalLM

VOCAB = 97


def tiny_config(**changes) -> MiniMindConfig:
    """Two layers, hidden 64, 4 query heads on 2 K/V heads, 97 tokens, 128 positions."""
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
    }
    return MiniMindConfig(**{**small, **changes})


def tiny_model(seed: int = 0, parts: dict | None = None, **changes) -> MiniMindForCausalLM:
    """A model of `tiny_config` in evaluation mode, every weight perturbed."""
    return perturb(MiniMindForCausalLM(tiny_config(**changes), parts=parts), seed).eval()


@torch.no_grad()
def perturb(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draw every weight anew, norm weights included: weights of one hide faults of order, cast and tie."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
    return model


def random_ids(batch: int = 2, seq: int = 12, seed: int = 0) -> torch.Tensor:
    """[batch, seq] of ordinary tokens: 0 to 2 are pad, bos and eos."""
    return torch.randint(3, VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b| / max |b|, infinite for different shapes."""
    if a.shape != b.shape:
        return float("inf")
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()


def to_transformers(model: MiniMindForCausalLM, attn_implementation: str = "eager") -> torch.nn.Module:
    """transformers' Qwen3ForCausalLM or Qwen3MoeForCausalLM with a copy of this model's weights, in evaluation mode."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = model.config
    rope = {"rope_type": "default"} if config.rope_scaling is None else {"rope_type": "yarn", **config.rope_scaling}
    rope.pop("type", None)
    same = (
        "hidden_size num_hidden_layers vocab_size num_attention_heads num_key_value_heads head_dim intermediate_size "
        "hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id pad_token_id"
    ).split()
    fields = {name: getattr(config, name) for name in same}
    fields.update(rope_parameters={**rope, "rope_theta": config.rope_theta}, attn_implementation=attn_implementation)
    if config.use_moe:
        experts = "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob".split()
        fields.update({name: getattr(config, name) for name in experts})
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, decoder_sparse_step=1, mlp_only_layers=[]))
    else:
        theirs = Qwen3ForCausalLM(Qwen3Config(**fields))
    theirs.load_state_dict(as_transformers(model.state_dict(), config))
    return theirs.eval()


def as_transformers(named: dict[str, torch.Tensor], config: MiniMindConfig) -> dict[str, torch.Tensor]:
    """Weights or gradients under transformers' names: dense names are equal, experts are stacked into one tensor."""
    named = {name: value.detach().clone() for name, value in named.items()}
    for layer in range(config.num_hidden_layers if config.use_moe else 0):
        start = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            [named.pop(f"{start}{expert}.{part}_proj.weight") for expert in range(config.num_experts)]
            for part in ("gate", "up", "down")
        )
        named[start + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        named[start + "down_proj"] = torch.stack(down)
    return named


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient by name; a parameter without one raises."""
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name: parameter.grad for name, parameter in model.named_parameters()}
