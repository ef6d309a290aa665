"""Grouped-query attention: every position looks back at the positions before it."""

import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import nn

from .cache import LayerCache
from .config import MiniMindConfig
from .linear import Linear
from .normalization import RMSNorm
from .rope import apply_rotary_pos_emb


def repeat_kv(x: torch.Tensor, n_rep: int) -> torch.Tensor:
    """Give each key/value head to n_rep query heads in a row: head order 0 0 0 1 1 1, never 0 1 0 1.

    x: [batch, seq, kv_heads, head_dim] -> [batch, seq, kv_heads * n_rep, head_dim]; n_rep = 1 returns x itself.
    Source: MiniMind, repeat_kv; Ainslie et al. 2023, "GQA".
    """
    if n_rep == 1:
        return x
    return repeat(x, "batch seq kv_heads head_dim -> batch seq (kv_heads n_rep) head_dim", n_rep=n_rep)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> torch.Tensor:
    """[query, key] bool: query i stands at position keys - queries + i and sees every key up to there."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)


def as_bool_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """A mask of 0 and 1 of any type as bool, True where a key may be seen. Raises ValueError for other values."""
    if attention_mask.dtype == torch.bool:
        return attention_mask
    mask = attention_mask.bool()
    if not mask.is_meta and not torch.equal(mask.to(attention_mask.dtype), attention_mask):
        low, high = (value.item() for value in attention_mask.aminmax())
        raise ValueError(
            f"attention_mask has values from {low:g} to {high:g}, but it must hold 1 for a key that may be seen and 0 "
            f"for one that may not; turn an additive mask (0 and -inf) into mask == 0"
        )
    return mask


def allowed_keys(
    queries: int, keys: int, attention_mask: torch.Tensor | None, device: torch.device | None = None
) -> torch.Tensor:
    """Who may look at whom: bool [batch or 1, 1, query, key], causal and, if a mask is given, without masked keys.

    attention_mask: [batch, key] or [batch, query, key], 1 or True where a key may be seen; key counts cached and new
    positions. A query without any allowed key (it is padding itself) sees its own position, so that nothing is NaN.
    Raises ValueError if the mask does not have one entry per key or holds other values than 0 and 1.
    """
    allowed = rearrange(causal_mask(queries, keys, device), "query key -> 1 1 query key")
    if attention_mask is None:
        return allowed
    if attention_mask.ndim not in (2, 3) or attention_mask.shape[-1] != keys:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, but there are {keys} keys "
            f"({keys - queries} cached + {queries} new); give [batch, {keys}]"
        )
    visible = as_bool_mask(attention_mask)
    if visible.ndim == 2:
        visible = rearrange(visible, "batch key -> batch 1 1 key")
    else:
        visible = rearrange(visible, "batch query key -> batch 1 query key")
    allowed = allowed & visible
    own = torch.eye(queries, keys, dtype=torch.bool, device=device).roll(keys - queries, dims=-1)
    return allowed | (own & ~allowed.any(dim=-1, keepdim=True))


def attention_weights(q: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim)) over the allowed keys, in float32: [batch, heads, query, key], in q's type.

    q: [batch, query, heads, head_dim]; k: [batch, key, heads, head_dim]; allowed: bool [batch or 1, 1, query, key].
    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1.
    """
    q = q / math.sqrt(q.shape[-1])
    scores = einsum(q, k, "batch query heads head_dim, batch key heads head_dim -> batch heads query key")
    scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)


class Attention(nn.Module):
    """Causal self-attention with fewer key/value heads than query heads, QK-norm and rotary positions.

    norm: the class of q_norm and k_norm, called as norm(head_dim, eps=...).
    Source: MiniMind, class Attention; QK-norm as in Qwen3.
    """

    def __init__(self, config: MiniMindConfig, norm: type[nn.Module] = RMSNorm):
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim, self.n_rep = head_dim, heads // kv_heads
        self.q_proj = Linear(config.hidden_size, heads * head_dim)
        self.k_proj = Linear(config.hidden_size, kv_heads * head_dim)
        self.v_proj = Linear(config.hidden_size, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, config.hidden_size)
        self.qk_norm, self.flash_attn = config.qk_norm, config.flash_attn
        if config.qk_norm:
            self.q_norm = norm(head_dim, eps=config.rms_norm_eps)
            self.k_norm = norm(head_dim, eps=config.rms_norm_eps)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_value: LayerCache | tuple[torch.Tensor, torch.Tensor] | None = None,
        use_cache: bool = False,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LayerCache | None]:
        """x: [batch, seq, hidden] -> (output [batch, seq, hidden], the longer past or None).

        position_embeddings: cos and sin, each [seq, head_dim], the rows of these positions;
        attention_mask: [batch, past + seq], 1 or True for keys that may be seen, or [batch, seq, past + seq].
        """
        split = "batch seq (heads head_dim) -> batch seq heads head_dim"
        q = rearrange(self.q_proj(x), split, head_dim=self.head_dim)
        k = rearrange(self.k_proj(x), split, head_dim=self.head_dim)
        v = rearrange(self.v_proj(x), split, head_dim=self.head_dim)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        past = None
        if past_key_value is not None or use_cache:
            past = _as_cache(past_key_value).append(k, v)
            k, v = past
        attend = self._fast if self.flash_attn else self._explicit
        output = rearrange(attend(q, k, v, attention_mask), "batch seq heads head_dim -> batch seq (heads head_dim)")
        return self.resid_dropout(self.o_proj(output)), past if use_cache else None

    def _explicit(self, q, k, v, attention_mask):
        allowed = allowed_keys(q.shape[1], k.shape[1], attention_mask, q.device)
        weights = self.attn_dropout(attention_weights(q, repeat_kv(k, self.n_rep), allowed))
        v = repeat_kv(v, self.n_rep)
        return einsum(weights, v, "batch heads query key, batch key heads head_dim -> batch query heads head_dim")

    def _fast(self, q, k, v, attention_mask):
        queries, keys = q.shape[1], k.shape[1]
        square = attention_mask is None and queries == keys  # scaled_dot_product_attention's own causal mask fits
        one = attention_mask is None and queries == 1  # a single new token sees every key
        allowed = None if square or one else allowed_keys(queries, keys, attention_mask, q.device)
        output = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),  # batch heads seq head_dim
            attn_mask=allowed,
            is_causal=square and not one,
            dropout_p=self.attn_dropout.p if self.training else 0.0,
            enable_gqa=self.n_rep > 1,
        )
        return output.transpose(1, 2)


def _as_cache(past) -> LayerCache:
    if past is None:
        return LayerCache()
    return past if isinstance(past, LayerCache) else LayerCache(*past)
