"""MiniMind's model, part by part: PyTorch and einops, nothing heavier.

Everything public imports from here; explorers and exercises are submodules, loaded on use.
"""

from .attention import Attention, allowed_keys, attention_weights, causal_mask, repeat_kv
from .cache import LayerCache, new_cache
from .config import MiniMindConfig
from .device import pick_device, random_tensor
from .feed_forward import FeedForward
from .generation import keep_top_k, keep_top_p, next_token_probs, penalize_repetition
from .loss import shifted_cross_entropy
from .microscope import Trace, agree, first_difference, intermediates, trace
from .model import CausalLMOutput, MiniMindBlock, MiniMindForCausalLM, MiniMindModel, count_parameters
from .moe import MOEFeedForward, MoEGate, load_balancing_loss
from .normalization import RMSNorm, rms_norm
from .rope import (
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

__all__ = [
    "Attention",
    "CausalLMOutput",
    "FeedForward",
    "LayerCache",
    "MOEFeedForward",
    "MiniMindBlock",
    "MiniMindConfig",
    "MiniMindForCausalLM",
    "MiniMindModel",
    "MoEGate",
    "RMSNorm",
    "Trace",
    "agree",
    "allowed_keys",
    "apply_rotary_pos_emb",
    "attention_weights",
    "causal_mask",
    "count_parameters",
    "first_difference",
    "intermediates",
    "keep_top_k",
    "keep_top_p",
    "load_balancing_loss",
    "new_cache",
    "next_token_probs",
    "penalize_repetition",
    "pick_device",
    "precompute_freqs_cis",
    "random_tensor",
    "repeat_kv",
    "rms_norm",
    "rope_frequencies",
    "rotate_half",
    "shifted_cross_entropy",
    "trace",
    "yarn_attention_factor",
    "yarn_frequencies",
    "yarn_pair_index",
    "yarn_ramp",
    "yarn_range",
]
