"""Exercises of notebook 04: repeated heads, the causal mask, the mask with padding, and the attention class."""

import contextlib
import functools
import itertools
import math
from unittest import mock

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import nn

import minimind_core as core

from ..attention import allowed_keys, causal_mask, repeat_kv
from ..config import MiniMindConfig
from ..rope import precompute_freqs_cis
from .compare import kind
from .framework import Exercise, case, draw

# 1. repeat_kv --------------------------------------------------------------------------------------------------------

repeated = Exercise(
    name="04_attention_gqa.repeat_kv",
    title="Give each key/value head to n_rep query heads in a row",
    signature="repeat_kv(x, n_rep)",
    reference=repeat_kv,
    cases=[
        case("two heads, each for three", torch.tensor([10.0, 20.0]).view(1, 1, 2, 1), 3),
        case("two heads of two numbers, each for two", torch.arange(1.0, 5.0).view(1, 1, 2, 2), 2),
        case("nothing to repeat", torch.arange(1.0, 5.0).view(1, 1, 2, 2), 1),
        case("two texts, three tokens", draw(2, 3, 2, 4, seed=200), 3),
        case("as many tokens as heads", draw(2, 4, 4, 6, seed=201), 2),
        case("not contiguous", draw(2, 2, 5, 4, seed=202).transpose(1, 2), 2),
        case("float16", draw(1, 2, 4, 96, seed=203, dtype=torch.float16), 2),
    ],
)


@repeated.mutant(
    "the heads are tiled: 0 1 0 1, where 0 0 1 1 belongs",
    "the shape is the same, so nothing crashes, but most query heads read another head's keys: 6 of 8 in MiniMind. "
    "Trained weights turn into noise. In einops: (kv_heads n_rep), not (n_rep kv_heads).",
    "the operator Tile of ONNX, torch.Tensor.repeat and np.tile count this way.",
)
def tiled(x, n_rep):
    return x.repeat(1, 1, n_rep, 1)


@repeated.mutant(
    "the tokens are repeated, not the heads: the axis is seq",
    "the axes are [batch, seq, kv_heads, head_dim], so the heads are axis 2.",
    "axis 1 is right where x is [batch, kv_heads, seq, head_dim], as in Hugging Face.",
)
def along_seq(x, n_rep):
    return x.repeat_interleave(n_rep, dim=1)


@repeated.mutant(
    "the features are repeated, not the heads: the axis is head_dim",
    "each key then has n_rep * head_dim numbers and fits no query. The heads are axis 2.",
)
def along_features(x, n_rep):
    return x.repeat_interleave(n_rep, dim=-1)


@repeated.mutant(
    "the texts are repeated: the axis is batch", "the heads are axis 2 of [batch, seq, kv_heads, head_dim]."
)
def along_batch(x, n_rep):
    return x.repeat_interleave(n_rep, dim=0)


@repeated.mutant(
    "each number is repeated within its head, and the row is then cut into heads anew",
    "the shape is right, but a new head is a part of an old one, stretched. A head must be copied whole.",
)
def stretched(x, n_rep):
    return x.repeat_interleave(n_rep, dim=-1).reshape(*x.shape[:2], -1, x.shape[-1])


@repeated.mutant(
    "the copies have an axis of their own",
    "attention wants one axis of heads. Merge the two, the K/V head first: (kv_heads n_rep).",
)
def not_merged(x, n_rep):
    return repeat(x, "batch seq kv_heads head_dim -> batch seq kv_heads n_rep head_dim", n_rep=n_rep)


@repeated.mutant(
    "there is one copy too many",
    "n_rep counts the query heads of each K/V head. The original is one of them, not one more.",
)
def one_more(x, n_rep):
    return x.repeat_interleave(n_rep + 1, dim=2)


@repeated.mutant(
    "the axes heads and seq changed places",
    "the order of the heads is right, but the result must stay [batch, seq, heads, head_dim].",
    "Hugging Face and scaled_dot_product_attention keep the heads before seq.",
)
def heads_first(x, n_rep):
    return x.repeat_interleave(n_rep, dim=2).transpose(1, 2)


@repeated.mutant(
    "nothing is repeated: x comes back as it was",
    "there are fewer key heads than query heads, and a product of the two would fail or, with one head, broadcast.",
)
def nothing_done(x, n_rep):
    return x.clone()


@repeated.mutant(
    "the copies are empty: only the first head of each group is filled",
    "a query head with zeros for keys looks at all tokens alike, and gets zeros for values.",
)
def zero_copies(x, n_rep):
    copies = torch.zeros_like(x.repeat_interleave(n_rep, dim=2))
    copies[:, :, ::n_rep] = x
    return copies


# 2. causal_mask ------------------------------------------------------------------------------------------------------


def causal_mask_reference(queries, keys):
    """[query, key] bool; query i stands at position keys - queries + i."""
    return causal_mask(queries, keys)


causal = Exercise(
    name="04_attention_gqa.causal_mask",
    title="Which keys a query may see, with and without a cache",
    signature="causal_mask(queries, keys)",
    reference=causal_mask_reference,
    cases=[
        case("two tokens, no cache", 2, 2),
        case("one new token after three", 1, 4),
        case("two new tokens after two", 2, 4),
        case("two new tokens after one", 2, 3),
        case("three tokens, no cache", 3, 3),
        case("three new tokens after four", 3, 7),
        case("the first token", 1, 1),
    ],
)


def lower(queries: int, keys: int, diagonal: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)


@causal.mutant(
    "the triangle begins at the top left, as if nothing were cached",
    "query i stands at position keys - queries + i. Here the first new token could see one key, the oldest.",
    "is_causal=True of scaled_dot_product_attention counts this way, which is right for as many queries as keys.",
)
def top_left(queries, keys):
    return lower(queries, keys, 0)


@causal.mutant(
    "a query sees the tokens after it, not those before",
    "in training it would copy the next token, which is the answer. Take tril, not triu.",
)
def sees_the_future(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries)


@causal.mutant(
    "True and False are exchanged: True marks what is hidden",
    "here True means: may be seen.",
    "torch.triu(..., diagonal=1) with masked_fill, and the masks of nn.MultiheadAttention, say True for hidden.",
)
def inverted(queries, keys):
    return ~lower(queries, keys, keys - queries)


@causal.mutant(
    "a query does not see its own position",
    "the first token then sees nothing, and softmax of nothing is NaN. The diagonal belongs to what may be seen.",
)
def not_itself(queries, keys):
    return lower(queries, keys, keys - queries - 1)


@causal.mutant(
    "a query sees one token of the future", "that token is the one to be predicted: the loss would fall to 0."
)
def one_ahead(queries, keys):
    return lower(queries, keys, keys - queries + 1)


@causal.mutant(
    "the mask is [queries, queries]: the cached keys have no column",
    "scores are [query, key], and key counts the cached tokens too.",
    "enough for a model that never has more than one new token behind a cache, as early MiniMind had.",
)
def new_tokens_only(queries, keys):
    return lower(queries, queries, 0)


@causal.mutant(
    "the mask is [keys, keys]: it has a row for each cached token too",
    "only the new tokens ask. Take the last `queries` rows of it.",
)
def all_rows(queries, keys):
    return lower(keys, keys, 0)


@causal.mutant(
    "the cached keys are hidden",
    "they are the past: every new token may see all of them.",
)
def past_hidden(queries, keys):
    return lower(queries, keys, keys - queries).triu(0) & (torch.arange(keys) >= keys - queries)


@causal.mutant(
    "as soon as there is a cache, everything may be seen",
    "right for one new token, which is the last. Of two new tokens the first must not see the second.",
    "enough where tokens are generated one at a time.",
)
def no_mask_with_cache(queries, keys):
    return lower(queries, keys, keys if keys > queries else 0)


@causal.mutant(
    "everything may be seen", "without the triangle a token sees its future: that is an encoder.", "BERT's way."
)
def all_seen(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool)


@causal.mutant(
    "rows and columns are exchanged: [key, query]",
    "scores are [query, key]: a row for each token that asks.",
)
def transposed(queries, keys):
    return lower(queries, keys, keys - queries).T


@causal.mutant(
    "the offset has the wrong sign",
    "with a cache the triangle moves to the right, by keys - queries.",
)
def wrong_sign(queries, keys):
    return lower(queries, keys, queries - keys)


@causal.mutant(
    "the mask holds 1 and 0 as float32", "masks are bool here: ~ and & work on them, and they take a byte each."
)
def ones_and_zeros(queries, keys):
    return lower(queries, keys, keys - queries).float()


@causal.mutant("the mask holds 1 and 0 as integers", "masks are bool here: ~1 is -2, not 0. Say dtype=torch.bool.")
def integers(queries, keys):
    return lower(queries, keys, keys - queries).long()


@causal.mutant(
    "the mask holds 0 and -inf, to be added to the scores",
    "here a mask says who may be seen; the next exercise joins two of them by &.",
    "MiniMind's own source adds such a mask to the scores.",
)
def additive(queries, keys):
    return torch.zeros(queries, keys).masked_fill(~lower(queries, keys, keys - queries), float("-inf"))


# 3. allowed_keys -----------------------------------------------------------------------------------------------------


def allowed_keys_reference(queries, keys, attention_mask):
    """bool [batch, 1, query, key]; a query without a key sees its own position."""
    return allowed_keys(queries, keys, attention_mask)


def mask(*rows: str) -> torch.Tensor:
    """mask("011") is a text with one token of padding on the left."""
    return torch.tensor([[int(digit) for digit in row] for row in rows])


allowed = Exercise(
    name="04_attention_gqa.allowed_keys",
    title="Join the causal mask and the padding mask",
    signature="allowed_keys(queries, keys, attention_mask)",
    reference=allowed_keys_reference,
    provides={"causal_mask": causal_mask},
    cases=[
        case("no mask: two new tokens after one", 2, 3, None),
        case("two tokens, the first is padding", 2, 2, mask("01")),
        case("three tokens, the last is padding", 3, 3, mask("110")),
        case("two texts, one with padding on the left", 3, 3, mask("111", "011")),
        case("two new tokens, two cached, of which one is padding", 2, 4, mask("0111", "1111")),
        case("a text that is padding throughout, with a cache", 2, 4, mask("0000", "0011")),
        case("a text that is padding throughout, no cache", 3, 3, mask("000")),
        case("padding on both sides, bool", 4, 4, mask("0110", "1110").bool()),
    ],
)


def causal_4d(queries: int, keys: int) -> torch.Tensor:
    return causal_mask(queries, keys)[None, None]


def real_keys(attention_mask: torch.Tensor) -> torch.Tensor:
    return attention_mask.bool()[:, None, None, :]


def own_position(queries: int, keys: int) -> torch.Tensor:
    return torch.eye(keys, dtype=torch.bool)[keys - queries :]


def never_empty(seen: torch.Tensor, instead: torch.Tensor | None = None) -> torch.Tensor:
    """What is seen, and in rows where that is nothing, `instead`: the own position unless given."""
    instead = own_position(*seen.shape[-2:]) if instead is None else instead
    return seen | (instead & ~seen.any(-1, keepdim=True))


def unless_none(function):
    """The mistake shows only where there is a padding mask."""

    def mistaken(queries, keys, attention_mask):
        if attention_mask is None:
            return causal_4d(queries, keys)
        return function(queries, keys, attention_mask)

    mistaken.__name__ = function.__name__
    return mistaken


@allowed.mutant(
    "a query without any key stays without",
    "softmax of a row of -inf is 0 / 0 = NaN, and one NaN spreads to the whole batch in the next gradient. Let such a "
    "query see its own position: nobody reads what it computes.",
)
@unless_none
def empty_rows(queries, keys, attention_mask):
    return causal_4d(queries, keys) & real_keys(attention_mask)


@allowed.mutant(
    "a query without any key sees all keys",
    "that is not NaN, but it lets a padded query look into the future. Its own position is enough.",
    "with -1e9 in place of -inf the weights of such a row spread over all keys by themselves.",
)
@unless_none
def empty_rows_see_all(queries, keys, attention_mask):
    seen = causal_4d(queries, keys) & real_keys(attention_mask)
    return never_empty(seen, torch.ones(queries, keys, dtype=torch.bool))


@allowed.mutant(
    "a query without any key sees the first key",
    "the rule is its own position, key keys - queries + i, which a causal mask always allows.",
)
@unless_none
def empty_rows_see_the_first(queries, keys, attention_mask):
    seen = causal_4d(queries, keys) & real_keys(attention_mask)
    return never_empty(seen, (torch.arange(keys) == 0).expand(queries, keys))


@allowed.mutant(
    "the own position is counted without the cached keys",
    "new token i stands at key keys - queries + i. Column i is an old token.",
)
@unless_none
def own_without_cache(queries, keys, attention_mask):
    seen = causal_4d(queries, keys) & real_keys(attention_mask)
    return never_empty(seen, torch.eye(queries, keys, dtype=torch.bool))


@allowed.mutant(
    "every query sees its own position, also where it has other keys",
    "the rule is for empty rows only. Here a padded token behind a text sees itself beside the text.",
)
@unless_none
def always_itself(queries, keys, attention_mask):
    return (causal_4d(queries, keys) & real_keys(attention_mask)) | own_position(queries, keys)


@allowed.mutant(
    "the padding is ignored",
    "the tokens of a text would read the filler in front of them. Padding on the right is out of sight anyway, padding "
    "on the left is not.",
)
@unless_none
def no_padding(queries, keys, attention_mask):
    return causal_4d(queries, keys).expand(len(attention_mask), 1, queries, keys)


@allowed.mutant("the causal mask is missing", "each token sees all real tokens, its own future included.")
@unless_none
def no_causal(queries, keys, attention_mask):
    return never_empty(real_keys(attention_mask).expand(-1, 1, queries, keys))


@allowed.mutant(
    "the two masks are joined by or",
    "a key must pass both: not in the future, and not padding. Join them by &.",
)
@unless_none
def joined_by_or(queries, keys, attention_mask):
    return never_empty(causal_4d(queries, keys) | real_keys(attention_mask))


@allowed.mutant(
    "the padding mask is inverted: the filler is seen, and the text is hidden",
    "1 stands for a real token here.",
    "key_padding_mask of nn.MultiheadAttention says True for padding.",
)
@unless_none
def padding_inverted(queries, keys, attention_mask):
    return never_empty(causal_4d(queries, keys) & ~real_keys(attention_mask))


@allowed.mutant(
    "the padding mask lies along the queries, not along the keys",
    "a mask [batch, key] says which keys are real: [batch, 1, 1, key]. What a padded query sees does not matter, since "
    "nobody reads it.",
)
@unless_none
def along_queries(queries, keys, attention_mask):
    new = attention_mask.bool()[:, None, keys - queries :, None]
    return never_empty(causal_4d(queries, keys) & new)


@allowed.mutant(
    "padded queries are emptied too",
    "harmless, since nobody reads them, but it is one step more, and it makes rows empty that had keys.",
)
@unless_none
def both_sides(queries, keys, attention_mask):
    new = attention_mask.bool()[:, None, keys - queries :, None]
    return never_empty(causal_4d(queries, keys) & real_keys(attention_mask) & new)


@allowed.mutant(
    "only the new tokens are looked up in the padding mask, the cached ones count as real",
    "the mask has an entry for each key, past and new. With a cache, padding on the left lies in the past.",
)
@unless_none
def cached_padding_seen(queries, keys, attention_mask):
    real = attention_mask.bool() | (torch.arange(keys) < keys - queries)
    return never_empty(causal_4d(queries, keys) & real_keys(real))


@allowed.mutant(
    "the causal mask begins at the top left, as if nothing were cached",
    "with a cache, new token i stands at position keys - queries + i: see exercise 2.",
)
def causal_top_left(queries, keys, attention_mask):
    seen = torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    return seen if attention_mask is None else never_empty(seen & real_keys(attention_mask))


@allowed.mutant(
    "the axis for the heads is missing: [batch, query, key]",
    "scores are [batch, heads, query, key]. Without an axis of 1 the batch would be taken for the heads.",
)
def no_head_axis(queries, keys, attention_mask):
    return allowed_keys(queries, keys, attention_mask).squeeze(1)


@allowed.mutant(
    "batch and heads changed places: [1, batch, query, key]",
    "each head would get another text's mask. The axes are [batch, heads, query, key], with 1 for the heads.",
)
def heads_before_batch(queries, keys, attention_mask):
    return allowed_keys(queries, keys, attention_mask).transpose(0, 1)


@allowed.mutant(
    "the result is not bool: & of bool and integers gives integers",
    "masked_fill wants bool, and ~1 is -2. Turn the padding mask into bool first: attention_mask.bool().",
)
@unless_none
def not_bool(queries, keys, attention_mask):
    return allowed_keys(queries, keys, attention_mask).long()


# 4. GroupedQueryAttention --------------------------------------------------------------------------------------------


MIX = "batch heads query key, batch key heads head_dim -> batch query heads head_dim"


class GroupedQueryAttention(nn.Module):
    """The reference, cut into steps, so that each mistake is one step done otherwise."""

    def __init__(self, config):
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.head_dim, self.n_rep = head_dim, heads // kv_heads
        self.q_proj = nn.Linear(config.hidden_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = core.RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = core.RMSNorm(head_dim, eps=config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x, position_embeddings, past_key_value=None, use_cache=False, attention_mask=None):
        """As core.Attention.forward, always on the explicit path."""
        q, k, v = (self.split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v, past = self.prepare(q, k, v, position_embeddings, past_key_value)
        seen = self.allowed(q.shape[1], k.shape[1], attention_mask).to(x.device)
        weights = self.drop(self.weigh(self.score(q, self.repeat_k(k)), seen).to(v.dtype))
        mixed = einsum(weights, self.repeat_v(v), MIX)
        return self.finish(self.merge(mixed)), past if use_cache else None

    def split(self, y):
        return rearrange(y, "batch seq (heads head_dim) -> batch seq heads head_dim", head_dim=self.head_dim)

    def prepare(self, q, k, v, position_embeddings, past):
        q, k, v = self.normalize(q, k, v)
        q, k, v = self.rotate(q, k, v, position_embeddings)
        past = self.remember(past, k, v)
        return q, *past, past

    def normalize(self, q, k, v):
        return self.q_norm(q), self.k_norm(k), v

    def rotate(self, q, k, v, position_embeddings):
        return *core.apply_rotary_pos_emb(q, k, *position_embeddings), v

    def remember(self, past, k, v):
        return (core.LayerCache() if past is None else past).append(k, v)

    def allowed(self, queries, keys, attention_mask):
        return allowed_keys(queries, keys, attention_mask)

    def repeat_k(self, k):
        return repeat_kv(k, self.n_rep)

    def repeat_v(self, v):
        return repeat_kv(v, self.n_rep)

    def score(self, q, k):
        products = einsum(q, k, "batch query heads head_dim, batch key heads head_dim -> batch heads query key")
        return products / self.scale()

    def scale(self):
        return math.sqrt(self.head_dim)

    def weigh(self, scores, seen):
        return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)

    def drop(self, weights):
        return self.attn_dropout(weights)

    def merge(self, mixed):
        return rearrange(mixed, "batch seq heads head_dim -> batch seq (heads head_dim)")

    def finish(self, merged):
        return self.resid_dropout(self.o_proj(merged))


def every_second(x, p=0.5, training=True, inplace=False):
    """In place of F.dropout: always drops the same numbers, every second one of the last axis."""
    if not training or not p:
        return x
    return x * (1 - torch.arange(x.shape[-1], device=x.device) % 2).to(x.dtype) / (1 - p)


@contextlib.contextmanager
def planned_dropout():
    """Inside, dropout is every_second: in nn.Dropout, F.dropout and scaled_dot_product_attention alike."""
    real = F.scaled_dot_product_attention

    def planned(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
        if not dropout_p:
            return real(q, k, v, attn_mask, 0.0, is_causal, **others)
        unit = torch.eye(k.shape[-2], dtype=v.dtype).expand(*k.shape[:-1], -1)  # with it as values, weights come out
        weights = every_second(real(q, k, unit, attn_mask, 0.0, is_causal, **others), dropout_p)
        return weights @ v.repeat_interleave(q.shape[-3] // v.shape[-3], dim=-3)

    with mock.patch.multiple(F, dropout=every_second, scaled_dot_product_attention=planned):
        yield


@functools.cache
def random_weights(config: MiniMindConfig) -> dict[str, torch.Tensor]:
    """Weights for an attention of this config, those of the norms not far from 1."""
    shapes = {name: value.shape for name, value in GroupedQueryAttention(config).state_dict().items()}
    weights = {name: draw(*shape, seed=300 + i, scale=0.6) for i, (name, shape) in enumerate(shapes.items())}
    return {name: 1 + value if "norm" in name else value for name, value in weights.items()}


def run_attention(cls, config, x, first_chunk, attention_mask, training):
    """Build it, give it weights, run it: in one pass, or first_chunk tokens and then the rest with the cache.

    Dropout drops every second number. Returns the output and what is in the cache: nothing at all, [0], where the
    past is None, [0, 0] where it is asked for and still empty.
    """
    module = cls(config).train(training)
    module.load_state_dict(random_weights(config))
    module = module.to(x.dtype)
    cos, sin = precompute_freqs_cis(config.head_dim, x.shape[1], 100.0)
    past, outputs = None, []
    for start, end in itertools.pairwise(sorted({0, first_chunk or x.shape[1], x.shape[1]})):
        seen = None if attention_mask is None else attention_mask[:, :end].bool()
        tables = cos[start:end], sin[start:end]
        with torch.no_grad(), planned_dropout():
            output, past = two(module(x[:, start:end], tables, past, first_chunk is not None, seen))
        outputs.append(output)
    if past is None:
        past = torch.zeros(0), torch.zeros(0)
    elif isinstance(past, core.LayerCache) and not past.length:
        past = (torch.zeros(0, 0), torch.zeros(0, 0)) if first_chunk else (torch.zeros(0), torch.zeros(0))
    return torch.cat(outputs, dim=1), *past


def two(returned):
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(
            f"forward returned {kind(returned)}; it must return two things: the output, and the past or None"
        )
    return returned


def sizes(hidden: int, heads: int, kv_heads: int, head_dim: int, **others) -> MiniMindConfig:
    return MiniMindConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=8,
        **others,
    )


SMALL, FOUR, PLAIN = sizes(6, 2, 1, 2), sizes(6, 4, 2, 4), sizes(6, 4, 2, 4, qk_norm=False)
HALF_DROPPED = sizes(6, 4, 2, 4, dropout=0.5)

grouped = Exercise(
    name="04_attention_gqa.GroupedQueryAttention",
    title="The whole attention of MiniMind, as a class",
    signature="GroupedQueryAttention(config)",
    reference=GroupedQueryAttention,
    call=run_attention,
    arguments=("config", "x", "first_chunk", "attention_mask", "training"),
    returns=("the output", "the keys of the cache", "the values of the cache"),
    provides={"repeat_kv": repeat_kv, "causal_mask": causal_mask, "allowed_keys": allowed_keys},
    tolerance={torch.float32: 1e-4},
    cases=[
        case("one token, two query heads, one K/V head", SMALL, draw(1, 1, 6, seed=210), None, None, False),
        case("two tokens", SMALL, draw(1, 2, 6, seed=211), None, None, False),
        case("three tokens, four query heads, two K/V heads", FOUR, draw(2, 3, 6, seed=212), None, None, False),
        case("as many tokens as heads", FOUR, draw(2, 4, 6, seed=213), None, None, False),
        case("no QK-norm, as in MiniMind-2", PLAIN, draw(1, 3, 6, seed=214), None, None, False),
        case("no QK-norm, and scores of hundreds", PLAIN, draw(1, 3, 6, seed=220, scale=12.0), None, None, False),
        case("one token in bfloat16", SMALL, draw(1, 1, 6, seed=221, dtype=torch.bfloat16), None, None, False),
        case("padding on the left", FOUR, draw(2, 4, 6, seed=215), None, mask("0011", "1111"), False),
        case("four tokens, and a cache is asked for", FOUR, draw(1, 4, 6, seed=219), 4, None, False),
        case("three tokens, then two more with the cache", FOUR, draw(1, 5, 6, seed=216), 3, None, False),
        case("the cache and padding on the left", FOUR, draw(2, 4, 6, seed=217), 3, mask("0111", "1111"), False),
        case(
            "in training, with a dropout of every second number",
            HALF_DROPPED,
            draw(1, 4, 6, seed=218),
            None,
            None,
            True,
        ),
        case("the same, not in training", HALF_DROPPED, draw(1, 4, 6, seed=218), None, None, False),
    ],
)


@grouped.mutant(
    "q and k are not normalized",
    "without QK-norm nothing bounds the scores, and weights trained with it do not fit.",
    "MiniMind-2 and Llama have no QK-norm.",
)
class NoNorm(GroupedQueryAttention):
    def normalize(self, q, k, v):
        return q, k, v


@grouped.mutant(
    "QK-norm comes after the rotation",
    "the length of a vector is the same then, but the weight of the norm multiplies features that are turned already: "
    "a score depends on the positions themselves, and not only on their distance.",
)
class NormAfterRotation(GroupedQueryAttention):
    def prepare(self, q, k, v, position_embeddings, past):
        q, k, v = self.normalize(*self.rotate(q, k, v, position_embeddings))
        past = self.remember(past, k, v)
        return q, *past, past


@grouped.mutant("k is not normalized, only q", "a score is bounded if both are: self.k_norm(k) belongs to the keys.")
class KeysNotNormed(GroupedQueryAttention):
    def normalize(self, q, k, v):
        return self.q_norm(q), k, v


@grouped.mutant("q is not normalized, only k", "a score is bounded if both are: self.q_norm(q) belongs to the queries.")
class QueriesNotNormed(GroupedQueryAttention):
    def normalize(self, q, k, v):
        return q, self.k_norm(k), v


@grouped.mutant("q_norm is used for k too", "each of the two has a weight of its own: q_norm(q), k_norm(k).")
class OneNorm(GroupedQueryAttention):
    def normalize(self, q, k, v):
        return self.q_norm(q), self.q_norm(k), v


@grouped.mutant("q_norm and k_norm are exchanged", "each has a weight of its own: q_norm(q), k_norm(k).")
class NormsExchanged(GroupedQueryAttention):
    def normalize(self, q, k, v):
        return self.k_norm(q), self.q_norm(k), v


@grouped.mutant("v is normalized too", "only scores need a bound. A value may be as large as the model wants.")
class NormedValues(GroupedQueryAttention):
    def normalize(self, q, k, v):
        return self.q_norm(q), self.k_norm(k), self.k_norm(v)


@grouped.mutant(
    "q and k are not rotated", "without positions, attention cannot tell 'dog bites man' from 'man bites dog'."
)
class NoRotation(GroupedQueryAttention):
    def rotate(self, q, k, v, position_embeddings):
        return q, k, v


@grouped.mutant(
    "k is not rotated, only q",
    "a score shows the distance of two tokens only if both are turned. apply_rotary_pos_emb returns two tensors.",
)
class KeysNotRotated(GroupedQueryAttention):
    def rotate(self, q, k, v, position_embeddings):
        return super().rotate(q, k, v, position_embeddings)[0], k, v


@grouped.mutant(
    "q is not rotated, only k",
    "a score shows the distance of two tokens only if both are turned. apply_rotary_pos_emb returns two tensors.",
)
class QueriesNotRotated(GroupedQueryAttention):
    def rotate(self, q, k, v, position_embeddings):
        return q, *super().rotate(q, k, v, position_embeddings)[1:]


@grouped.mutant(
    "cos and sin are exchanged",
    "position_embeddings is (cos, sin): pass it on as *position_embeddings.",
)
class CosForSin(GroupedQueryAttention):
    def rotate(self, q, k, v, position_embeddings):
        return super().rotate(q, k, v, position_embeddings[::-1])


@grouped.mutant(
    "v is rotated too",
    "a value is what is handed over. Turned by its position, the same word would say something else at each place.",
)
class RotatedValues(GroupedQueryAttention):
    def rotate(self, q, k, v, position_embeddings):
        q, k, v = super().rotate(q, k, v, position_embeddings)
        return q, k, core.apply_rotary_pos_emb(v, v, *position_embeddings)[1]


@grouped.mutant(
    "the keys go into the cache before they are rotated",
    "the tables hold the new positions only, so an old key must be kept as it was turned at its own position.",
)
class CacheBeforeRotation(GroupedQueryAttention):
    def prepare(self, q, k, v, position_embeddings, past):
        q, k, v = self.normalize(q, k, v)
        past = self.remember(past, k, v)
        k, v = past
        return *self.rotate(q, k, v, position_embeddings), past


@grouped.mutant(
    "the heads are repeated before they go into the cache",
    "the numbers are right, but the cache is n_rep times as large, and a small cache is what grouped heads are for.",
)
class RepeatBeforeCache(GroupedQueryAttention):
    def prepare(self, q, k, v, position_embeddings, past):
        q, k, v = self.rotate(*self.normalize(q, k, v), position_embeddings)
        past = self.remember(past, super().repeat_k(k), super().repeat_v(v))
        return q, *past, past

    def repeat_k(self, k):
        return k

    def repeat_v(self, v):
        return v


@grouped.mutant(
    "the past is not used: the new tokens see only each other",
    "past_key_value holds the keys and values of all tokens before. Append the new ones and attend to all of them.",
)
class PastIgnored(GroupedQueryAttention):
    def remember(self, past, k, v):
        return core.LayerCache(k, v)

    def allowed(self, queries, keys, attention_mask):
        return allowed_keys(queries, keys, None if attention_mask is None else attention_mask[:, -keys:])


@grouped.mutant(
    "k and v are not taken out of the longer past: the new tokens see only each other",
    "after past = past.append(k, v) the old keys are in past alone. Write k, v = past.",
)
class PastNotTakenOut(GroupedQueryAttention):
    def prepare(self, q, k, v, position_embeddings, past):
        q, k, v = self.rotate(*self.normalize(q, k, v), position_embeddings)
        return q, k, v, self.remember(past, k, v)


@grouped.mutant(
    "no past is returned, though use_cache is True",
    "the next tokens need the keys and values of these. Return the longer past beside the output.",
)
class NeverRemembers(GroupedQueryAttention):
    def forward(self, x, position_embeddings, past_key_value=None, use_cache=False, attention_mask=None):
        return super().forward(x, position_embeddings, past_key_value, False, attention_mask)


@grouped.mutant(
    "append is called, but what it returns is not kept",
    "a LayerCache never changes: append returns a longer one, and the old one stays empty. Write past = "
    "past.append(k, v).",
)
class AppendAlone(GroupedQueryAttention):
    def remember(self, past, k, v):
        return core.LayerCache() if past is None else past


@grouped.mutant(
    "what append returns is not kept",
    "a LayerCache never changes: append returns a longer one. Write past = past.append(k, v).",
)
class AppendDropped(GroupedQueryAttention):
    def prepare(self, q, k, v, position_embeddings, past):
        q, k, v = self.rotate(*self.normalize(q, k, v), position_embeddings)
        return q, k, v, core.LayerCache() if past is None else past

    def allowed(self, queries, keys, attention_mask):
        return allowed_keys(queries, keys, None if attention_mask is None else attention_mask[:, -keys:])


@grouped.mutant(
    "the mask has a column for each new token only",
    "with a cache there are more keys than queries. Take the number of keys from k, after the past is in it.",
)
class SquareMask(GroupedQueryAttention):
    def allowed(self, queries, keys, attention_mask):
        square = causal_4d(queries, queries)
        if attention_mask is None:
            return square
        return never_empty(square & real_keys(attention_mask), own_position(queries, queries))


@grouped.mutant(
    "the new keys stand before the old ones",
    "the mask counts on the order of the text: first the past, then the new tokens.",
)
class NewBeforeOld(GroupedQueryAttention):
    def remember(self, past, k, v):
        if past is not None:
            k, v = torch.cat([k, past[0]], dim=1), torch.cat([v, past[1]], dim=1)
        return core.LayerCache(k, v)


@grouped.mutant(
    "the past is returned also where use_cache is False",
    "in training nobody asks for it, and it would keep the keys and values of all layers in memory.",
)
class AlwaysRemembers(GroupedQueryAttention):
    def forward(self, x, position_embeddings, past_key_value=None, use_cache=False, attention_mask=None):
        return super().forward(x, position_embeddings, past_key_value, True, attention_mask)


@grouped.mutant(
    "the scores are divided by the root of hidden_size",
    "a score is a sum over one head's features. Divided by the root of head_dim it has size 1; this divisor makes all "
    "weights nearly equal.",
)
class ScaledByHidden(GroupedQueryAttention):
    def scale(self):
        return math.sqrt(self.q_proj.in_features)


@grouped.mutant(
    "the scores are not divided by the root of head_dim",
    "a sum of head_dim products is about sqrt(head_dim) large: softmax then takes one key and drops the rest.",
)
class Unscaled(GroupedQueryAttention):
    def scale(self):
        return 1.0


@grouped.mutant(
    "the scores are divided by head_dim, not by its root",
    "the spread of a sum grows with the root of the number of terms. Divided by head_dim, all weights become alike.",
)
class ScaledByHeadDim(GroupedQueryAttention):
    def scale(self):
        return self.head_dim


@grouped.mutant(
    "the scores are multiplied by the root of head_dim",
    "that makes them larger still. Divide.",
)
class MultipliedByRoot(GroupedQueryAttention):
    def scale(self):
        return 1 / math.sqrt(self.head_dim)


@grouped.mutant(
    "the scores are [batch, heads, key, query]: keys and queries changed places",
    "a row belongs to the token that asks. Here each token is asked by the others, and the mask hides the wrong half.",
)
class ScoresTransposed(GroupedQueryAttention):
    def score(self, q, k):
        return super().score(q, k).transpose(-2, -1)


@grouped.mutant(
    "exp is taken of the scores as they are",
    "e to a score over 88 is infinity in float32, and infinity through infinity is NaN. Take the largest score away "
    "first, or call softmax, which does.",
)
class NoMaximum(GroupedQueryAttention):
    def weigh(self, scores, seen):
        shares = scores.float().masked_fill(~seen, float("-inf")).exp()
        return shares / shares.sum(dim=-1, keepdim=True)


@grouped.mutant(
    "the weights stay in float32, while the values are in the model's type",
    "a product needs two of one type. Bring the weights back by .to(q.dtype).",
)
class NotBroughtBack(GroupedQueryAttention):
    def drop(self, weights):
        return self.attn_dropout(weights).float()


@grouped.mutant(
    "softmax runs over the queries: dim=-2",
    "each query shares out a weight of 1 among its keys: the last axis of [batch, heads, query, key].",
)
class SoftmaxOverQueries(GroupedQueryAttention):
    def weigh(self, scores, seen):
        return scores.masked_fill(~seen, float("-inf")).softmax(dim=-2)


@grouped.mutant(
    "softmax runs over the heads: dim=1",
    "each query shares out a weight of 1 among its keys: the last axis. Heads do not compete.",
)
class SoftmaxOverHeads(GroupedQueryAttention):
    def weigh(self, scores, seen):
        return scores.masked_fill(~seen, -1e9).softmax(dim=1)


@grouped.mutant(
    "there is no softmax: the scores themselves are the weights",
    "weights must be positive and sum to 1, so that the result is a mean of values.",
)
class NoSoftmax(GroupedQueryAttention):
    def weigh(self, scores, seen):
        return scores.masked_fill(~seen, 0.0)


@grouped.mutant(
    "no mask is applied: every token sees all others",
    "in training a token would see the next one, which it has to predict.",
    "BERT and other encoders look both ways.",
)
class NoMask(GroupedQueryAttention):
    def allowed(self, queries, keys, attention_mask):
        return torch.ones(1, 1, queries, keys, dtype=torch.bool)


@grouped.mutant(
    "attention_mask is not used", "the real tokens of a text that is padded on the left would read the filler."
)
class PaddingIgnored(GroupedQueryAttention):
    def allowed(self, queries, keys, attention_mask):
        return allowed_keys(queries, keys, None)


@grouped.mutant(
    "the causal mask is missing where there is an attention_mask",
    "the padding mask says which keys are real. It does not say which are in the future: both masks are needed.",
)
class PaddingOnly(GroupedQueryAttention):
    def allowed(self, queries, keys, attention_mask):
        if attention_mask is None:
            return allowed_keys(queries, keys, None)
        return never_empty(real_keys(attention_mask).expand(-1, 1, queries, keys))


@grouped.mutant(
    "the triangle of the mask begins at the top left, so with a cache the new tokens see only the oldest keys",
    "query i stands at position keys - queries + i.",
    "is_causal=True of scaled_dot_product_attention counts from the top left.",
)
class TopLeft(GroupedQueryAttention):
    def allowed(self, queries, keys, attention_mask):
        return causal_top_left(queries, keys, attention_mask)


@grouped.mutant(
    "the mask comes after softmax",
    "the hidden keys have taken their share already, and a row no longer sums to 1. Put -inf into the scores.",
)
class MaskAfterSoftmax(GroupedQueryAttention):
    def weigh(self, scores, seen):
        return scores.softmax(dim=-1).masked_fill(~seen, 0.0)


@grouped.mutant(
    "the mask is inverted: what may be seen is hidden",
    "masked_fill fills where its mask is True, so it needs ~allowed.",
)
class MaskInverted(GroupedQueryAttention):
    def weigh(self, scores, seen):
        return scores.masked_fill(seen, float("-inf")).softmax(dim=-1)


@grouped.mutant(
    "0 is written into the hidden scores, where -inf belongs",
    "softmax of 0 is e^0 = 1, not 0: hidden keys get a share like others.",
)
class ZeroForInfinity(GroupedQueryAttention):
    def weigh(self, scores, seen):
        return scores.masked_fill(~seen, 0.0).softmax(dim=-1)


def tile(x: torch.Tensor, n_rep: int) -> torch.Tensor:
    return x.repeat(1, 1, n_rep, 1)


@grouped.mutant(
    "k and v are tiled: heads 0 1 0 1, where 0 0 1 1 belongs",
    "the shapes are right, but query heads read the keys of another group.",
)
class BothTiled(GroupedQueryAttention):
    def repeat_k(self, k):
        return tile(k, self.n_rep)

    def repeat_v(self, v):
        return tile(v, self.n_rep)


@grouped.mutant(
    "k and v are not repeated: there are fewer of their heads than of the queries'",
    "each query head needs a key head to meet. With one K/V head alone nothing crashes, since an axis of 1 broadcasts.",
)
class NotRepeated(GroupedQueryAttention):
    def repeat_k(self, k):
        return k

    def repeat_v(self, v):
        return v


@grouped.mutant(
    "v is tiled, heads 0 1 0 1, while k is repeated as 0 0 1 1",
    "a query head finds a token by the keys of one head and takes the values of another.",
)
class ValuesTiled(GroupedQueryAttention):
    def repeat_v(self, v):
        return tile(v, self.n_rep)


@grouped.mutant(
    "k is tiled, heads 0 1 0 1, while v is repeated as 0 0 1 1",
    "a query head finds a token by the keys of one head and takes the values of another.",
)
class KeysTiled(GroupedQueryAttention):
    def repeat_k(self, k):
        return tile(k, self.n_rep)


@grouped.mutant(
    "the projections are cut as [batch, heads, seq, head_dim] without a transpose",
    "a view does not move numbers: the first half of the tokens became the first heads. Cut into [batch, seq, heads, "
    "head_dim].",
)
class CutWithoutTranspose(GroupedQueryAttention):
    def split(self, y):
        return y.reshape(y.shape[0], -1, y.shape[1], self.head_dim).transpose(1, 2)


@grouped.mutant(
    "the projections are cut as (head_dim heads)",
    "a head's features lie in a row in the weights: (heads head_dim).",
)
class FeaturesBeforeHeads(GroupedQueryAttention):
    def split(self, y):
        return rearrange(y, "batch seq (head_dim heads) -> batch seq heads head_dim", head_dim=self.head_dim)


@grouped.mutant(
    "the heads are merged without moving their axis back behind seq",
    "[batch, heads, seq, head_dim] and then reshape mixes tokens. Move the heads to axis 2 first.",
)
class MergedWithoutTranspose(GroupedQueryAttention):
    def merge(self, mixed):
        return mixed.transpose(1, 2).reshape(*mixed.shape[:2], -1)


@grouped.mutant(
    "the heads are merged as (head_dim heads)",
    "o_proj reads the first head's features first: (heads head_dim).",
)
class MergedByFeature(GroupedQueryAttention):
    def merge(self, mixed):
        return rearrange(mixed, "batch seq heads head_dim -> batch seq (head_dim heads)")


@grouped.mutant(
    "o_proj is missing",
    "without it the heads stay side by side; o_proj mixes them and brings them back to hidden_size.",
)
class NoOutputProjection(GroupedQueryAttention):
    def finish(self, merged):
        return self.resid_dropout(merged)


@grouped.mutant(
    "the weights are not dropped out in training",
    "self.attn_dropout belongs around the attention weights, after softmax.",
    "MiniMind trains with a dropout of 0, so there it makes no difference.",
)
class NoWeightDropout(GroupedQueryAttention):
    def drop(self, weights):
        return weights


@grouped.mutant(
    "dropout falls on the scores, before softmax",
    "a score of 0 still gets a share. self.attn_dropout belongs around the weights, after softmax.",
)
class ScoresDropped(GroupedQueryAttention):
    def score(self, q, k):
        return self.attn_dropout(super().score(q, k))

    def drop(self, weights):
        return weights


@grouped.mutant(
    "dropout falls outside training too",
    "a model in use must give the same answer twice. self.attn_dropout knows self.training; F.dropout and "
    "scaled_dot_product_attention have to be told.",
)
class AlwaysDrops(GroupedQueryAttention):
    def forward(self, x, position_embeddings, past_key_value=None, use_cache=False, attention_mask=None):
        self.attn_dropout.train()
        return super().forward(x, position_embeddings, past_key_value, use_cache, attention_mask)


@grouped.mutant(
    "the output is not dropped out in training",
    "self.resid_dropout belongs around the result of o_proj, before it is added to the stream.",
    "MiniMind trains with a dropout of 0, so there it makes no difference.",
)
class NoOutputDropout(GroupedQueryAttention):
    def finish(self, merged):
        return self.o_proj(merged)


EXERCISES = [repeated, causal, allowed, grouped]
