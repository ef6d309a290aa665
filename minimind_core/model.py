"""The whole model: block, stack of blocks, language model."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from . import generation
from .attention import Attention, as_bool_mask
from .cache import LayerCache
from .config import MiniMindConfig
from .feed_forward import FeedForward
from .linear import Linear
from .loss import shifted_cross_entropy
from .moe import MOEFeedForward, MoEGate
from .normalization import RMSNorm
from .rope import precompute_freqs_cis

PARTS = ("norm", "attention", "feed_forward")


class _Parts(NamedTuple):
    norm: type[nn.Module]
    attention: type[nn.Module]
    feed_forward: type[nn.Module]


def _choose_parts(config: MiniMindConfig, parts: dict[str, type[nn.Module]] | _Parts | None) -> _Parts:
    if isinstance(parts, _Parts):
        return parts
    parts = parts or {}
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        raise ValueError(f"unknown parts {unknown}; choose among {', '.join(PARTS)}")
    norm = parts.get("norm") or partial(RMSNorm, cast=config.rms_norm_cast)
    return _Parts(
        norm, parts.get("attention") or partial(Attention, norm=norm), parts.get("feed_forward") or FeedForward
    )


class MiniMindBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [batch, seq, hidden] -> the same shape.

    Source: MiniMind, class MiniMindBlock; the pre-norm order of Llama.
    """

    def __init__(self, layer_id: int, config: MiniMindConfig, parts: dict[str, type[nn.Module]] | None = None):
        super().__init__()
        chosen = _choose_parts(config, parts)
        self.layer_id = layer_id
        self.self_attn = chosen.attention(config)
        self.input_layernorm = chosen.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = chosen.norm(config.hidden_size, eps=config.rms_norm_eps)
        if config.use_moe:
            self.mlp = MOEFeedForward(config, expert=chosen.feed_forward)
        else:
            self.mlp = chosen.feed_forward(config)
        self.mlp_dropout = nn.Dropout(config.dropout if config.ffn_dropout else 0.0)

    def forward(
        self,
        x: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_value: LayerCache | None = None,
        use_cache: bool = False,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LayerCache | None]:
        """Arguments and results as `Attention.forward`."""
        attended, past = self.self_attn(
            self.input_layernorm(x), position_embeddings, past_key_value, use_cache, attention_mask
        )
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MOEFeedForward):
            padding = attention_mask is not None and attention_mask.ndim == 2
            fed = self.mlp(normed, attention_mask[:, -x.shape[1] :] if padding else None)
        else:
            fed = self.mlp(normed)
        return x + self.mlp_dropout(fed), past


class MiniMindModel(nn.Module):
    """Embedding, blocks, final norm: ids [batch, seq] -> hidden states [batch, seq, hidden].

    The rotary tables are a function of the config alone: never saved, always float32, rebuilt where they are needed.
    """

    def __init__(self, config: MiniMindConfig, parts: dict[str, type[nn.Module]] | None = None):
        super().__init__()
        chosen = _choose_parts(config, parts)
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MiniMindBlock(i, config, chosen) for i in range(config.num_hidden_layers))
        self.norm = chosen.norm(config.hidden_size, eps=config.rms_norm_eps)
        cos, sin = self._rotary_tables()
        self.register_buffer("freqs_cos", cos, persistent=False)
        self.register_buffer("freqs_sin", sin, persistent=False)

    def _rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        return precompute_freqs_cis(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )

    def _apply(self, fn, recurse=True):
        tables = self.freqs_cos, self.freqs_sin
        super()._apply(fn, recurse)
        # of .half(), .to() and to_empty() the tables take the device only
        self._place_tables(tables, self.freqs_cos.device)
        return self

    @torch.inference_mode(False)  # tables that are made while generating can serve training later
    def _place_tables(self, tables: tuple[torch.Tensor, torch.Tensor], device: torch.device):
        if tables[0].is_meta:  # only planned until now
            with device:
                tables = self._rotary_tables()
        self.freqs_cos, self.freqs_sin = (table.to(device) for table in tables)

    def _positions(self, start: int, seq: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if start + seq > self.freqs_cos.shape[0]:
            raise ValueError(
                f"positions {start} to {start + seq - 1} are asked for, but the rotary table ends at "
                f"{self.freqs_cos.shape[0] - 1}; shorten the text or raise max_position_embeddings"
            )
        if self.freqs_cos.device != device:  # weights were assigned to a model built on the meta device
            self._place_tables((self.freqs_cos, self.freqs_sin), device)
        return self.freqs_cos[start : start + seq], self.freqs_sin[start : start + seq]

    def check_ids(self, input_ids: torch.Tensor):
        """Raise ValueError unless input_ids is [batch, seq], seq at least 1, of ids within the vocabulary."""
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids has shape {list(input_ids.shape)}; give [batch, seq] with at least one token")
        if input_ids.is_meta or input_ids.numel() == 0:
            return
        low, high = (value.item() for value in input_ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size} tokens")

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: tuple[LayerCache, ...] | None = None,
        use_cache: bool = False,
    ) -> tuple[torch.Tensor, tuple[LayerCache, ...] | None, torch.Tensor]:
        """-> (hidden states after the final norm, the longer past or None, the layers' summed aux loss, 0 if dense)."""
        self.check_ids(input_ids)
        batch, seq = input_ids.shape
        past = past_key_values if past_key_values is not None else [None] * len(self.layers)
        if len(past) != len(self.layers):
            raise ValueError(f"past_key_values has {len(past)} entries, the model has {len(self.layers)} layers")
        start = _cached_length(past[0])
        if attention_mask is not None:
            shape = tuple(attention_mask.shape)
            if shape not in ((batch, start + seq), (batch, seq, start + seq)):
                raise ValueError(
                    f"attention_mask has shape {list(attention_mask.shape)}; it must be [{batch}, {start + seq}]: "
                    f"{batch} rows, {start} cached + {seq} new keys (or one such row per query, [{batch}, {seq}, "
                    f"{start + seq}])"
                )
            attention_mask = as_bool_mask(attention_mask)
            if not attention_mask.is_meta and attention_mask.all():
                attention_mask = None  # nothing is hidden
        x = self.dropout(self.embed_tokens(input_ids))
        position_embeddings = self._positions(start, seq, x.device)
        presents, aux_loss = [], x.new_zeros((), dtype=torch.float32)
        for layer, layer_past in zip(self.layers, past, strict=True):
            x, present = layer(x, position_embeddings, layer_past, use_cache, attention_mask)
            presents.append(present)
            if isinstance(layer.mlp, MOEFeedForward):
                aux_loss = aux_loss + layer.mlp.aux_loss
        return self.norm(x), tuple(presents) if use_cache else None, aux_loss


def _cached_length(past) -> int:
    if past is None:
        return 0
    return past.length if isinstance(past, LayerCache) else past[0].shape[1]


@dataclass
class CausalLMOutput:
    """What a forward pass gives. `loss` excludes `aux_loss`: a trainer adds it once."""

    loss: torch.Tensor | None  # scalar, None without labels
    aux_loss: torch.Tensor  # scalar, includes its coefficient; 0 for a dense model
    logits: torch.Tensor  # [batch, seq or logits_to_keep, vocab]
    past_key_values: tuple[LayerCache, ...] | None  # one per layer, None without use_cache
    hidden_states: torch.Tensor  # [batch, seq, hidden], after the final norm


class MiniMindForCausalLM(nn.Module):
    """MiniMindModel and the head that turns hidden states into logits over the vocabulary.

    With tie_word_embeddings lm_head.weight *is* embed_tokens.weight: one Parameter, used at both ends.
    parts: a reader's own classes in place of the core's: "norm", called as norm(dim, eps=...), "attention", called as
    attention(config), "feed_forward", called as feed_forward(config, intermediate_size).
    Source: MiniMind, class MiniMindForCausalLM.
    """

    def __init__(self, config: MiniMindConfig | None = None, parts: dict[str, type[nn.Module]] | None = None):
        super().__init__()
        self.config = config or MiniMindConfig()
        self.model = MiniMindModel(self.config, parts)
        self.lm_head = Linear(self.config.hidden_size, self.config.vocab_size)
        self.tie_weights()
        self.init_weights()

    def tie_weights(self):
        """Make the head use the embedding's Parameter, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self):
        """Draw every linear and embedding weight from N(0, initializer_range^2); norms start at one.

        Sets every weight, so that it also serves a model built on the meta device, after `to_empty`.
        """
        self.tie_weights()
        for module in self.modules():
            is_gate = isinstance(module, MoEGate) and self.config.gate_init == "normal"
            if isinstance(module, nn.Linear | nn.Embedding) or is_gate:
                module.weight.normal_(0, self.config.initializer_range)
            elif hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As nn.Module's; afterwards the head is tied again, also after assign=True.

        Raises ValueError if the head is tied here, but the two weights in state_dict differ: one of them would be lost.
        """
        ends = [state_dict.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight")]
        both = self.config.tie_word_embeddings and all(end is not None for end in ends)
        if both and ends[0].data_ptr() != ends[1].data_ptr() and not torch.equal(*ends):
            raise ValueError(
                "model.embed_tokens.weight and lm_head.weight differ in this state_dict, but the config ties them; "
                "use tie_word_embeddings=False"
            )
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        self.tie_weights()
        if assign:  # the tables are in no state_dict: they follow the weights to their device
            tables = self.model.freqs_cos, self.model.freqs_sin
            self.model._place_tables(tables, self.model.embed_tokens.weight.device)
        return result

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: tuple[LayerCache, ...] | None = None,
        use_cache: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        labels: torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """input_ids: [batch, seq]; attention_mask: [batch, past + seq], 1 for keys that may be seen;
        logits_to_keep: 0 for all positions, n for the last n, or a tensor of positions;
        labels: [batch, seq], unshifted.
        """
        if labels is not None and (isinstance(logits_to_keep, torch.Tensor) or logits_to_keep != 0):
            raise ValueError(
                f"labels need the logits of all positions; leave logits_to_keep at 0, not {logits_to_keep}"
            )
        hidden, past, aux_loss = self.model(input_ids, attention_mask, past_key_values, use_cache)
        if isinstance(logits_to_keep, torch.Tensor):
            kept = hidden[:, logits_to_keep]
        elif logits_to_keep < 0:
            raise ValueError(f"logits_to_keep is {logits_to_keep}; 0 keeps all, n keeps the last n")
        else:
            kept = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
        logits = self.lm_head(kept)
        loss = None if labels is None else shifted_cross_entropy(logits, labels)
        return CausalLMOutput(loss, aux_loss, logits, past, hidden)

    generate = generation.generate


class ParameterCount(NamedTuple):
    total: int
    active: int


def count_parameters(model: nn.Module) -> ParameterCount:
    """(total, active): each Parameter once; active leaves out the experts that one token does not visit."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    for module in model.modules():
        if isinstance(module, MOEFeedForward):
            one_expert = sum(parameter.numel() for parameter in module.experts[0].parameters())
            idle += (len(module.experts) - module.k) * one_expert
    return ParameterCount(total, total - idle)
