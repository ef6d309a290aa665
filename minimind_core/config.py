"""MiniMindConfig: every number that decides the shape of the model, checked once, here."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from .rope import check_rope_scaling

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}  # hidden_act: by name
YARN_MINIMIND = {
    "type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.0,
}


@dataclass(frozen=True)
class MiniMindConfig:
    """Configuration of MiniMind. One class serves the dense model and the mixture of experts.

    The defaults are MiniMind-3 dense (63.9M parameters). Frozen: make a variant with `config.replace(field=value)`.
    Raises ValueError for values that cannot work together and TypeError for unknown fields; both name the numbers.
    Source: MiniMind, model/model_minimind.py, class MiniMindConfig.
    """

    # the residual stream
    hidden_size: int = 768  # width of the residual stream
    num_hidden_layers: int = 8  # blocks, one after the other
    use_moe: bool = False  # True: every feed-forward becomes a mixture of experts
    vocab_size: int = 6400  # rows of the embedding table: 36 reserved + 256 bytes + 6108 merges
    dropout: float = 0.0  # probability, on the embedding, the attention weights and the attention output
    ffn_dropout: bool = False  # True: dropout after the feed-forward too (MiniMind-2)
    # attention
    num_attention_heads: int = 8  # query heads
    num_key_value_heads: int = 4  # key and value heads; each serves heads / kv_heads query heads
    head_dim: int | None = None  # width of one head; None: hidden_size // num_attention_heads
    qk_norm: bool = True  # RMSNorm on each head's q and k (MiniMind-3)
    flash_attn: bool = True  # True: scaled_dot_product_attention; False: the explicit path, same numbers
    # feed-forward
    intermediate_size: int | None = None  # width inside SwiGLU; None: ceil(hidden_size * pi / 64) * 64
    hidden_act: str = "silu"  # activation of the gate branch, by name
    # positions
    max_position_embeddings: int = 32768  # length of the rotary table: the longest past + prompt
    rope_theta: float = 1e6  # base of the rotary frequencies
    inference_rope_scaling: bool = False  # True: rope_scaling becomes MiniMind's YaRN dictionary
    rope_scaling: dict[str, Any] | None = None  # a YaRN dictionary, given directly
    # norms
    rms_norm_eps: float = 1e-6  # inside the root of every RMSNorm
    rms_norm_cast: str = "after_weight"  # cast back to half precision after (MiniMind-3) or before_weight (MiniMind-2)
    # head, initialization, special tokens
    tie_word_embeddings: bool = True  # lm_head uses the embedding's Parameter
    initializer_range: float = 0.02  # standard deviation of every linear and embedding weight
    bos_token_id: int = 1  # begins a text
    eos_token_id: int = 2  # ends a text; generation stops here
    pad_token_id: int = 0  # fills rows up to the longest
    # mixture of experts, used when use_moe
    num_experts: int = 4  # routed experts in each layer
    num_experts_per_tok: int = 1  # k: how many of them each token visits
    n_shared_experts: int = 0  # experts that every token visits (MiniMind-2: 1)
    moe_intermediate_size: int | None = None  # width inside one expert; None: intermediate_size
    norm_topk_prob: bool = True  # rescale the k weights so that they sum to 1
    router_aux_loss_coef: float = 5e-4  # factor of the load-balancing loss
    seq_aux: bool = False  # load balance per sequence (MiniMind-2) instead of over the batch
    router_gradient: str = "exact"  # or "straight_through": weight p / p.detach() when k = 1 is renormalized
    gate_init: str = "normal"  # router initialization: normal, or kaiming_uniform (MiniMind-2)

    def __post_init__(self):
        self._check_sizes()
        fill = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen dataclass)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or give head_dim"
                )
            fill("head_dim", self.hidden_size // self.num_attention_heads)
        if self.intermediate_size is None:
            fill("intermediate_size", math.ceil(self.hidden_size * math.pi / 64) * 64)
        if self.moe_intermediate_size is None:
            fill("moe_intermediate_size", self.intermediate_size)
        if self.rope_scaling is not None:
            fill("rope_scaling", dict(self.rope_scaling))
        elif self.inference_rope_scaling:
            fill("rope_scaling", dict(YARN_MINIMIND))
        if self.rope_scaling is not None:
            check_rope_scaling(self.rope_scaling)
        self._check_choices()

    def _check_sizes(self):
        for name in (
            "hidden_size num_hidden_layers vocab_size num_attention_heads num_key_value_heads head_dim "
            "intermediate_size max_position_embeddings num_experts num_experts_per_tok moe_intermediate_size"
        ).split():
            value = getattr(self, name)
            if value is None and name in ("head_dim", "intermediate_size", "moe_intermediate_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by "
                f"num_key_value_heads {self.num_key_value_heads}; "
                f"each K/V head must serve the same number of query heads"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is larger than num_experts {self.num_experts}; "
                f"a token can visit each expert once"
            )
        if not isinstance(self.n_shared_experts, int) or self.n_shared_experts < 0:
            raise ValueError(f"n_shared_experts is {self.n_shared_experts!r}; it must be 0 or more")

    def _check_choices(self):
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; the rotary embedding turns pairs, so it must be even")
        choices = {
            "hidden_act": ACTIVATIONS,
            "rms_norm_cast": ("after_weight", "before_weight"),
            "router_gradient": ("exact", "straight_through"),
            "gate_init": ("normal", "kaiming_uniform"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it is a probability, at least 0 and below 1")
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.router_aux_loss_coef < 0:
            raise ValueError(f"router_aux_loss_coef is {self.router_aux_loss_coef}; it must be 0 or more")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name} {getattr(self, name)} is outside the vocabulary of {self.vocab_size} tokens")

    def replace(self, **changes) -> "MiniMindConfig":
        """A copy with some fields changed. Fields that were derived (head_dim, widths) are derived anew."""
        derived = {
            "head_dim": self.hidden_size // self.num_attention_heads,
            "intermediate_size": math.ceil(self.hidden_size * math.pi / 64) * 64,
            "moe_intermediate_size": self.intermediate_size,
        }
        fields = dataclasses.asdict(self)
        fields.update({name: None for name, value in derived.items() if fields[name] == value})
        if self.inference_rope_scaling and self.rope_scaling == YARN_MINIMIND:
            fields["rope_scaling"] = None
        return MiniMindConfig(**{**fields, **changes})

    def to_dict(self) -> dict[str, Any]:
        """All fields as a plain dictionary."""
        return dataclasses.asdict(self)

    # presets

    @classmethod
    def minimind_3(cls, **changes) -> "MiniMindConfig":
        """MiniMind-3 dense: 63,912,192 parameters. The defaults."""
        return cls(**changes)

    @classmethod
    def minimind_3_moe(cls, **changes) -> "MiniMindConfig":
        """MiniMind-3 mixture of experts: 198,416,640 parameters, 63,936,768 active for one token."""
        return cls(**{"use_moe": True, **changes})

    @classmethod
    def minimind_2_small(cls, **changes) -> "MiniMindConfig":
        """MiniMind-2 small: 26M parameters (MiniMind at commit 9d89857)."""
        return cls(**{**_minimind_2(changes.get("hidden_size", 512)), **changes})

    @classmethod
    def minimind_2(cls, **changes) -> "MiniMindConfig":
        """MiniMind-2: 104M parameters."""
        return cls(**{**_minimind_2(changes.get("hidden_size", 768)), "num_hidden_layers": 16, **changes})

    @classmethod
    def minimind_2_moe(cls, **changes) -> "MiniMindConfig":
        """MiniMind-2 mixture of experts: 145M parameters, one shared expert, two of four routed ones."""
        return cls(**{**_minimind_2(changes.get("hidden_size", 640)), "use_moe": True, **changes})


def _minimind_2(hidden_size: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_key_value_heads": 2,
        "qk_norm": False,
        "intermediate_size": 64 * math.ceil(int(hidden_size * 8 / 3) / 64),
        "rms_norm_eps": 1e-5,
        "rms_norm_cast": "before_weight",
        "ffn_dropout": True,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "router_aux_loss_coef": 0.01,
        "seq_aux": True,
        "gate_init": "kaiming_uniform",
    }
