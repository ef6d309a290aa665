"""config.json: MiniMindConfig in the words of transformers' Qwen3, Qwen3-MoE and Llama, and back."""

import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from .config import MiniMindConfig
from .rope import check_rope_scaling

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}
CONFIG_FILE = "config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PLAIN = {  # what these architectures could have besides, and MiniMind has not
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
NEEDED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings "
    "rms_norm_eps tie_word_embeddings"
).split()


def load_config(path: str | Path) -> MiniMindConfig:
    """The config of a folder, or of a config.json: Qwen3, Qwen3-MoE, Llama, or MiniMind's own.

    Token ids that it leaves out are MiniMind's 1, 2 and 0. rms_norm_cast, unless given: before the weight for a Llama
    and a MiniMind-2. Raises ValueError, with the reason, for an architecture that MiniMind does not have.
    """
    file = Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)
    settings = read_json(file)
    kind = settings.get("model_type")
    if kind not in ARCHITECTURES and kind != "minimind":
        raise ValueError(
            f"{file} describes a model of type {kind!r}; read here are {', '.join(ARCHITECTURES)} and minimind: "
            f"load it with transformers' AutoModelForCausalLM"
        )
    try:
        return _minimind_config(settings) if kind == "minimind" else _standard_config(settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def _known_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """MiniMindConfig's fields among the settings. Raises ValueError for settings that MiniMind cannot follow."""
    for name, plain in {**PLAIN, "partial_rotary_factor": 1.0, "quantization_config": None}.items():
        if settings.get(name, plain) not in (plain, None):
            raise ValueError(f"{name} is {settings[name]}; MiniMind has only {plain}")
    theta, scaling = _rope(settings)
    found = {**settings, "rope_theta": theta, "rope_scaling": scaling}
    known = {field.name: found[field.name] for field in fields(MiniMindConfig) if found.get(field.name) is not None}
    ends = known.get("eos_token_id")
    if isinstance(ends, list):
        known["eos_token_id"] = ends[0]
        warnings.warn(f"config.json ends texts at any of eos_token_id {ends}; only {ends[0]} is kept", stacklevel=4)
    return known


def _standard_config(settings: dict[str, Any]) -> MiniMindConfig:
    kind, known = settings["model_type"], _known_fields(settings)
    needed = NEEDED + ["rope_theta"] + ["head_dim"] * (kind == "qwen3")
    if kind == "qwen3_moe":
        known["num_experts"] = settings.get("num_local_experts", settings.get("num_experts"))
        needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"]
    if missing := [name for name in needed if known.get(name) is None]:
        raise ValueError(f"lacks {', '.join(missing)}; take the model's complete config.json")
    known.setdefault("num_key_value_heads", known["num_attention_heads"])
    known.setdefault("rms_norm_cast", "before_weight" if kind == "llama" else "after_weight")
    config = MiniMindConfig(**{**known, "use_moe": kind == "qwen3_moe", "qk_norm": kind != "llama"})
    if config.rope_scaling and not _yarn_in_force(config):
        raise ValueError(
            f"max_position_embeddings {config.max_position_embeddings} is not above YaRN's "
            f"original_max_position_embeddings {config.rope_scaling['original_max_position_embeddings']}: transformers "
            f"stretches all the same, MiniMind would not; raise max_position_embeddings to the stretched window"
        )
    return config


def _minimind_config(settings: dict[str, Any]) -> MiniMindConfig:
    known = _known_fields(settings)
    known.pop("rope_scaling", None)  # MiniMind derives it from inference_rope_scaling alone
    if "n_routed_experts" not in settings:
        return MiniMindConfig(**known)
    known.update(num_experts=settings["n_routed_experts"], router_aux_loss_coef=settings.get("aux_loss_alpha", 0.01))
    if settings.get("num_experts_per_tok", 2) == 1:
        known["norm_topk_prob"] = False  # MiniMind-2 leaves a single weight as it is
    return MiniMindConfig.minimind_2(**{"num_hidden_layers": 8, "hidden_size": 512, **known})


def _rope(settings: dict[str, Any]) -> tuple[float | None, dict[str, Any] | None]:
    """(rope_theta, a YaRN dictionary or None), from transformers' new rope_parameters or its older two fields."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope = {name: value for name, value in given.items() if value is not None}
    theta = rope.pop("rope_theta", settings.get("rope_theta"))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind not in ("default", "yarn") or (kind == "default" and rope):
        raise ValueError(f"its rotary positions are of rope_type {kind!r} {rope}; MiniMind has the plain ones and yarn")
    return theta, {"rope_type": kind, **rope} if kind == "yarn" else None


def to_settings(config: MiniMindConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says: transformers' fields, and MiniMindConfig's others, which transformers does not use."""
    kind = _model_type(config)
    own = {name: value for name, value in config.to_dict().items() if name not in ("use_moe", "qk_norm")}
    del own["inference_rope_scaling"]  # rope_scaling says it
    own["rope_scaling"] = None
    if _yarn_in_force(config):
        scaling = check_rope_scaling(config.rope_scaling)
        scaling.pop("type", None)
        own["rope_scaling"] = {**scaling, "rope_type": "yarn"}
    named = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    return named | own | PLAIN


def _model_type(config: MiniMindConfig) -> str:
    if not config.use_moe:
        return "qwen3" if config.qk_norm else "llama"
    reason = ""
    if config.n_shared_experts:
        reason = f"it has {config.n_shared_experts} shared experts in each layer, Qwen3-MoE has none"
    elif not config.qk_norm:
        reason = "its heads have no QK-norm, Qwen3-MoE's have"
    if reason:
        raise ValueError(
            f"no class of transformers holds this mixture of experts: {reason}; keep it with "
            f"torch.save(model.state_dict(), file), which from_pretrained(file, config) reads"
        )
    return "qwen3_moe"


def _yarn_in_force(config: MiniMindConfig) -> bool:
    scaling = config.rope_scaling
    return scaling is not None and config.max_position_embeddings > scaling["original_max_position_embeddings"]


def config_from_shapes(weights: dict[str, torch.Tensor], source: Path) -> MiniMindConfig:
    """MiniMind-3 with QK-norm, else MiniMind-2, in the sizes that the shapes show; warns of what they do not show."""
    first, shape = "model.layers.0.", {name: value.shape for name, value in weights.items()}
    q, k, moe = first + "self_attn.q_proj.weight", first + "self_attn.k_proj.weight", first + "mlp.gate.weight" in shape
    width = first + ("mlp.experts.0" if moe else "mlp") + ".gate_proj.weight"
    if missing := [name for name in (EMBEDDING, q, k, width) if len(shape.get(name, ())) != 2]:
        raise ValueError(
            f"{source} holds no MiniMind weights that tell their sizes: no matrix {', '.join(missing)}; "
            f"it has {', '.join(list(shape)[:8])}"
        )
    qk_norm = first + "self_attn.q_norm.weight"
    head_dim = shape[qk_norm][0] if qk_norm in shape else max(shape[q][0] // 8, 1)
    sizes = {
        "vocab_size": shape[EMBEDDING][0],
        "hidden_size": shape[EMBEDDING][1],
        "num_hidden_layers": len({name.split(".")[2] for name in shape if name.startswith("model.layers.")}),
        "num_attention_heads": shape[q][0] // head_dim,
        "num_key_value_heads": shape[k][0] // head_dim,
        "head_dim": head_dim,
        "intermediate_size": shape[width][0],
        "tie_word_embeddings": HEAD not in weights or torch.equal(weights[HEAD], weights[EMBEDDING]),
        "use_moe": moe,
    }
    if moe:
        sizes["num_experts"] = shape[first + "mlp.gate.weight"][0]
        shared = {name.split(".")[5] for name in shape if name.startswith(first + "mlp.shared_experts.")}
        sizes["n_shared_experts"] = len(shared)
    config = (MiniMindConfig if qk_norm in shape else MiniMindConfig.minimind_2)(**sizes)
    assumed = ["rms_norm_eps", "rope_theta", "max_position_embeddings", "rope_scaling"]
    assumed += ["num_experts_per_tok", "norm_topk_prob"] * moe + ["num_attention_heads"] * (qk_norm not in shape)
    warnings.warn(
        f"{source} comes without a config: its shapes are those of a MiniMind-{3 if qk_norm in shape else 2}; assumed "
        f"are {', '.join(f'{name} {getattr(config, name)}' for name in assumed)}; give config=MiniMindConfig(...) if "
        f"it was trained otherwise",
        stacklevel=3,
    )
    return config


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}; download or copy it anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, not an object of names and values")
    return found
