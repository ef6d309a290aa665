"""Exercises of notebook 05: a longer past, one chunk behind a cache, its bytes, and writing with it."""

import torch

from ..attention import attention_weights, causal_mask, repeat_kv
from ..config import MiniMindConfig
from ..model import MiniMindForCausalLM
from ..rope import apply_rotary_pos_emb, precompute_freqs_cis
from .framework import Exercise, case, draw

# 1. append -----------------------------------------------------------------------------------------------------------


def append_reference(past_k, past_v, k, v):
    """All tensors [batch, seq, kv_heads, head_dim]; past_k and past_v are None in the first pass."""
    if past_k is None:
        return k, v
    return torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)


def append_case(label, batch, past, new, kv_heads, head_dim, seed):
    shapes = [(batch, past, kv_heads, head_dim)] * 2 if past else []
    pasts = [draw(*shape, seed=seed + i) for i, shape in enumerate(shapes)] or [None, None]
    return case(label, *pasts, *(draw(batch, new, kv_heads, head_dim, seed=seed + 2 + i) for i in range(2)))


append = Exercise(
    name="05_kv_cache.append",
    title="The longer past: old keys and values, then the new ones",
    signature="append(past_k, past_v, k, v)",
    reference=append_reference,
    returns=("k", "v"),
    cases=[
        append_case("no past yet, two new tokens", 1, 0, 2, 1, 2, seed=300),
        append_case("one old token, one new", 1, 1, 1, 1, 2, seed=304),
        append_case("as many new tokens as old ones", 1, 2, 2, 2, 4, seed=308),
        append_case("five old tokens, one new, two texts", 2, 5, 1, 2, 4, seed=312),
        append_case("batch, past, new and kv_heads are all 2", 2, 2, 2, 2, 4, seed=316),
    ],
)


def joined(past_k, past_v, k, v, dim):
    if past_k is None:
        return k, v
    return torch.cat([past_k, k], dim=dim), torch.cat([past_v, v], dim=dim)


@append.mutant(
    "the new tokens stand before the old ones",
    "a place in the cache is a position of the text: the mask and the next append count on that order.",
)
def new_first(past_k, past_v, k, v):
    return append_reference(k, v, past_k, past_v) if past_k is not None else (k, v)


@append.mutant(
    "the tensors are joined along the heads",
    "the cache then has twice the heads and no new position. seq is axis 1 here.",
    "axis 2 is right where tensors are [batch, kv_heads, seq, head_dim], as in Hugging Face.",
)
def along_heads(past_k, past_v, k, v):
    return joined(past_k, past_v, k, v, dim=2)


@append.mutant(
    "the tensors are joined along the batch",
    "that makes another text of the new tokens. torch.cat takes axis 0 unless dim says otherwise.",
)
def along_batch(past_k, past_v, k, v):
    return joined(past_k, past_v, k, v, dim=0)


@append.mutant(
    "the tensors are joined along head_dim",
    "keys become wider, and no query fits them any more. The text grows along seq, axis 1.",
)
def along_features(past_k, past_v, k, v):
    return joined(past_k, past_v, k, v, dim=-1)


@append.mutant(
    "the past is dropped: only the new k and v come back", "every token would then look at its own chunk alone."
)
def past_dropped(past_k, past_v, k, v):
    return k, v


@append.mutant(
    "the new tokens are dropped: the past comes back as it was",
    "the next token could not see the one before it.",
)
def new_dropped(past_k, past_v, k, v):
    return (k, v) if past_k is None else (past_k, past_v)


@append.mutant("v is not joined with its past", "each weight needs its value: as many rows in v as in k.")
def values_forgotten(past_k, past_v, k, v):
    return append_reference(past_k, past_v, k, v)[0], v


@append.mutant("the past values were joined with the new keys", "a slip of copying: the second line needs v.")
def keys_among_values(past_k, past_v, k, v):
    if past_k is None:
        return k, v
    return torch.cat([past_k, k], dim=1), torch.cat([past_v, k], dim=1)


@append.mutant("v comes first in what is returned", "the caller unpacks k, v = ...; the order is the meaning.")
def values_first(past_k, past_v, k, v):
    return append_reference(past_k, past_v, k, v)[::-1]


@append.mutant(
    "the oldest tokens are dropped, so that the cache keeps its length",
    "the full past must stay visible: MiniMind's attention has no window.",
    "models with a sliding window, such as Mistral 7B, do this once the window is full.",
)
def window(past_k, past_v, k, v):
    if past_k is None:
        return k, v
    return tuple(x[:, -past_k.shape[1] :] for x in append_reference(past_k, past_v, k, v))


@append.mutant(
    "the first pass, where the past is None, is not handled",
    "there is nothing to join with yet: return k and v as they are.",
)
def none_not_handled(past_k, past_v, k, v):
    return torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)


@append.mutant(
    "a tensor stands where a yes or no is wanted",
    "PyTorch can't say whether a tensor of many numbers is true. Ask whether it is there: if past_k is None.",
)
def asked_for_truth(past_k, past_v, k, v):
    if not past_k:
        return k, v
    return append_reference(past_k, past_v, k, v)


# 2. decode_step ------------------------------------------------------------------------------------------------------


def attend(q, k, v, allowed=None):
    """Softmax attention of q [batch, new, heads, head_dim] over k, v [batch, keys, kv_heads, head_dim]."""
    n_rep = q.shape[2] // k.shape[2]
    allowed = causal_mask(q.shape[1], k.shape[1], q.device) if allowed is None else allowed
    weights = attention_weights(q, repeat_kv(k, n_rep), allowed)
    return torch.einsum("bhqk,bkhd->bqhd", weights, repeat_kv(v, n_rep))


def turn(q, k, cos, sin, start):
    return apply_rotary_pos_emb(q, k, cos[start : start + q.shape[1]], sin[start : start + q.shape[1]])


def length(past_k):
    return 0 if past_k is None else past_k.shape[1]


def decode_step_reference(q, k, v, past_k, past_v, cos, sin):
    """q: [batch, new, heads, head_dim]; k, v: [batch, new, kv_heads, head_dim], not yet turned; cos, sin: the whole
    tables [positions, head_dim]; past_k, past_v: None or [batch, past, kv_heads, head_dim], keys already turned."""
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v), k, v


def step_case(label, batch, past, new, heads, kv_heads, head_dim, seed):
    cos, sin = precompute_freqs_cis(head_dim, past + new + 1, 100.0)
    q = draw(batch, new, heads, head_dim, seed=seed)
    k, v = (draw(batch, new, kv_heads, head_dim, seed=seed + i) for i in (1, 2))
    pasts = [draw(batch, past, kv_heads, head_dim, seed=seed + i) for i in (3, 4)] if past else [None, None]
    return case(label, q, k, v, *pasts, cos, sin)


decode_step = Exercise(
    name="05_kv_cache.decode_step",
    title="Attention of one chunk of tokens behind a cache",
    signature="decode_step(q, k, v, past_k, past_v, cos, sin)",
    reference=decode_step_reference,
    returns=("output", "k", "v"),
    provides={"append": append_reference},
    tolerance={torch.float32: 1e-4},
    cases=[
        step_case("one new token behind one old one, two query heads on one K/V head", 1, 1, 1, 2, 1, 2, seed=320),
        step_case("three tokens and no past: a prefill", 1, 0, 3, 2, 1, 4, seed=330),
        step_case("a chunk of two behind three", 1, 3, 2, 4, 2, 4, seed=340),
        step_case("a chunk of three behind two, two texts", 2, 2, 3, 4, 2, 8, seed=350),
        step_case("one new token behind six", 2, 6, 1, 4, 2, 8, seed=360),
        step_case("as many K/V heads as query heads", 1, 3, 3, 2, 2, 4, seed=370),
    ],
)


@decode_step.mutant(
    "the positions of the chunk start again at 0",
    "the chunk then seems to stand beside the beginning of the text. Take the rows of cos and sin from the length of "
    "the past on.",
)
def positions_restart(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, 0)
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v), k, v


@decode_step.mutant(
    "the positions are one too far behind a past",
    "the first new token stands at position past: with three old tokens, 0 to 2, it is number 3.",
)
def one_too_far(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, 0 if past_k is None else length(past_k) + 1)
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v), k, v


@decode_step.mutant(
    "the mask starts at the top left, as if there were no past",
    "new token number 0 would see key 0 only. The diagonal lies at keys - queries: tril(diagonal=past).",
    "is_causal=True of scaled_dot_product_attention is that mask, so it fits only where nothing is cached.",
)
def top_left_mask(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v, torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril()), k, v


@decode_step.mutant(
    "there is no mask",
    "one new token needs none, but in a chunk the first token would see the later ones.",
)
def no_mask(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v, torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)), k, v


@decode_step.mutant(
    "the mask has a row for each key",
    "its rows are the new queries: core.allowed_keys(new, past + new, None, device).",
)
def row_for_each_key(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v, causal_mask(k.shape[1], k.shape[1], q.device)), k, v


@decode_step.mutant(
    "the mask is the wrong way round",
    "True means allowed here. A row without any allowed key gives NaN.",
    "in torch.nn.MultiheadAttention True means forbidden.",
)
def mask_turned_round(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v, ~causal_mask(q.shape[1], k.shape[1], q.device)), k, v


@decode_step.mutant(
    "the mask is skipped whenever there is a past",
    "that is right for one new token only. In a later chunk of a prompt the tokens would see what follows them.",
)
def no_mask_behind_a_past(q, k, v, past_k, past_v, cos, sin):
    mask = None if past_k is None else torch.ones(q.shape[1], length(past_k) + q.shape[1], dtype=torch.bool)
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v, mask), k, v


@decode_step.mutant(
    "the mask lets each token see the one after it",
    "the diagonal is keys - queries, not one more.",
)
def sees_the_next(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1] + 1)
    return attend(q, k, v, mask), k, v


@decode_step.mutant(
    "the new tokens look at the new keys only",
    "the past is kept, but nobody reads it. Attention needs the k and v that append returns.",
)
def past_not_read(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    return attend(q, k, v), *append_reference(past_k, past_v, k, v)


@decode_step.mutant(
    "the past is neither read nor handed on",
    "the new tokens then look at their own chunk alone. Join past_k and past_v with the new k and v: that is append.",
)
def past_ignored(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    return attend(q, k, v), k, v


@decode_step.mutant(
    "k and v are handed on with their heads repeated",
    "the next pass expects kv_heads heads. Give the repeated tensors other names, and return what append gave.",
)
def handed_on_repeated(q, k, v, past_k, past_v, cos, sin):
    n_rep = q.shape[2] // k.shape[2]
    output, k, v = decode_step_reference(q, k, v, past_k, past_v, cos, sin)
    return output, repeat_kv(k, n_rep), repeat_kv(v, n_rep)


@decode_step.mutant(
    "k or v is not repeated for the query heads",
    "each query head needs a key and a value: core.repeat_kv(x, n_rep) with n_rep = heads / kv_heads, for both.",
)
def not_repeated(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    weights = attention_weights(q, k, causal_mask(q.shape[1], k.shape[1], q.device))
    return torch.einsum("bhqk,bkhd->bqhd", weights, repeat_kv(v, q.shape[2] // k.shape[2])), k, v


@decode_step.mutant(
    "the cache holds the heads after repeat_kv",
    "that stores the same numbers several times: heads / kv_heads times the memory. Repeat them after the append, for "
    "this pass only.",
)
def cached_after_repeat(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    n_rep = q.shape[2] // k.shape[2]
    k, v = append_reference(past_k, past_v, repeat_kv(k, n_rep), repeat_kv(v, n_rep))
    return attend(q, k, v), k, v


@decode_step.mutant(
    "the cache holds the new keys as they were before the turn",
    "later passes take the past as it is: keys that were never turned have no position. Turn k, then append.",
    "some programs keep unturned keys and turn all of them in every pass, to be able to shift positions.",
)
def cached_before_turn(q, k, v, past_k, past_v, cos, sin):
    output, _, longer_v = decode_step_reference(q, k, v, past_k, past_v, cos, sin)
    return output, append_reference(past_k, past_v, k, v)[0], longer_v


@decode_step.mutant(
    "the whole cache is turned again",
    "old keys were turned when they were new. Turned twice they stand at twice their position.",
)
def turned_twice(q, k, v, past_k, past_v, cos, sin):
    start = length(past_k)
    q, _ = turn(q, k, cos, sin, start)
    k, v = append_reference(past_k, past_v, k, v)
    _, k = turn(k, k, cos, sin, 0)
    return attend(q, k, v), k, v


@decode_step.mutant(
    "q is not turned",
    "the score then depends on the key's position alone, and not on the distance between the two.",
)
def query_not_turned(q, k, v, past_k, past_v, cos, sin):
    _, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v), k, v


@decode_step.mutant(
    "the new keys are not turned, or are appended before the turn",
    "apply_rotary_pos_emb returns both q and k, turned. The turned k goes into the append.",
)
def new_keys_not_turned(q, k, v, past_k, past_v, cos, sin):
    q, _ = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v), k, v


@decode_step.mutant("neither q nor k is turned", "without the turn the new tokens have no position at all.")
def nothing_turned(q, k, v, past_k, past_v, cos, sin):
    k, v = append_reference(past_k, past_v, k, v)
    return attend(q, k, v), k, v


@decode_step.mutant("sin and cos are exchanged", "apply_rotary_pos_emb takes q, k, cos, sin: cos first.")
def sin_first(q, k, v, past_k, past_v, cos, sin):
    return decode_step_reference(q, k, v, past_k, past_v, sin, cos)


@decode_step.mutant(
    "the values are turned as well", "only q and k meet in a score. What is handed over stays as it is."
)
def values_turned(q, k, v, past_k, past_v, cos, sin):
    _, v = turn(q, v, cos, sin, length(past_k))
    return decode_step_reference(q, k, v, past_k, past_v, cos, sin)


@decode_step.mutant(
    "the new keys stand before the old ones",
    "the mask takes the last places for the new tokens: each would see the wrong keys. Old first, then new.",
)
def new_before_old(q, k, v, past_k, past_v, cos, sin):
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(k, v, past_k, past_v) if past_k is not None else (k, v)
    return attend(q, k, v), k, v


@decode_step.mutant(
    "only the new k and v are handed on",
    "the next pass would know nothing of the text before. Return the longer past.",
)
def only_new_handed_on(q, k, v, past_k, past_v, cos, sin):
    output, longer_k, longer_v = decode_step_reference(q, k, v, past_k, past_v, cos, sin)
    return output, longer_k[:, -k.shape[1] :], longer_v[:, -k.shape[1] :]


@decode_step.mutant(
    "the K/V heads are tiled, 0 1 0 1, where 0 0 1 1 belongs",
    "query heads 0 and 1 share K/V head 0. core.repeat_kv gives that order.",
)
def tiled(q, k, v, past_k, past_v, cos, sin):
    n_rep = q.shape[2] // k.shape[2]
    q, k = turn(q, k, cos, sin, length(past_k))
    k, v = append_reference(past_k, past_v, k, v)
    output = attend(q, *(x.repeat(1, 1, n_rep, 1) for x in (k, v)))
    return output, k, v


@decode_step.mutant(
    "the output has the heads before the tokens",
    "the weights are [batch, heads, query, key], but the output is [batch, new, heads, head_dim], as q is.",
    "scaled_dot_product_attention of PyTorch has its heads before the tokens.",
)
def heads_first(q, k, v, past_k, past_v, cos, sin):
    output, k, v = decode_step_reference(q, k, v, past_k, past_v, cos, sin)
    return output.transpose(1, 2), k, v


@decode_step.mutant("output stands last in what is returned", "the caller unpacks output, k, v = ...: in this order.")
def output_last(q, k, v, past_k, past_v, cos, sin):
    output, k, v = decode_step_reference(q, k, v, past_k, past_v, cos, sin)
    return k, v, output


@decode_step.mutant(
    "the scores are not divided by the root of head_dim",
    "larger scores, sharper weights: not what the model was trained with. core.attention_weights divides.",
)
def not_scaled(q, k, v, past_k, past_v, cos, sin):
    return decode_step_reference(q * q.shape[-1] ** 0.5, k, v, past_k, past_v, cos, sin)


# 3. cache_bytes ------------------------------------------------------------------------------------------------------


def cache_bytes_reference(config, batch, seq, bytes_each):
    """config: a MiniMindConfig; bytes_each: 4 for float32, 2 for bfloat16. Returns an int."""
    width = config.num_key_value_heads * config.head_dim
    return 2 * config.num_hidden_layers * batch * seq * width * bytes_each


SMALL = MiniMindConfig(hidden_size=20, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=8)

cache_bytes = Exercise(
    name="05_kv_cache.cache_bytes",
    title="Bytes of the K/V cache",
    signature="cache_bytes(config, batch, seq, bytes_each)",
    reference=cache_bytes_reference,
    cases=[
        case("one token of a small model, one byte a number", SMALL, 1, 1, 1),
        case("one text of five tokens, in bfloat16", SMALL, 1, 5, 2),
        case("three texts of five tokens, in float32", SMALL, 3, 5, 4),
        case("MiniMind-3, four texts of 1,000 tokens, in bfloat16", MiniMindConfig(), 4, 1000, 2),
    ],
)


@cache_bytes.mutant("only the keys are counted", "each token leaves a key and a value: twice as much.")
def keys_only(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, batch, seq, bytes_each) // 2


@cache_bytes.mutant("the layers are forgotten", "every layer has keys and values of its own.")
def one_layer(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, batch, seq, bytes_each) // config.num_hidden_layers


@cache_bytes.mutant(
    "num_attention_heads are counted, where num_key_value_heads belong",
    "the cache holds the few K/V heads. They are repeated for the query heads only while a pass runs.",
    "with multi-head attention, as in GPT-2 or Llama-2 7B, both numbers are the same.",
)
def query_heads(config, batch, seq, bytes_each):
    width = config.num_attention_heads * config.head_dim
    return 2 * config.num_hidden_layers * batch * seq * width * bytes_each


@cache_bytes.mutant(
    "hidden_size was taken for the width of the keys",
    "a layer keeps num_key_value_heads * head_dim numbers for k, and as many for v; the stream itself is not kept.",
)
def hidden_width(config, batch, seq, bytes_each):
    return 2 * config.num_hidden_layers * batch * seq * config.hidden_size * bytes_each


@cache_bytes.mutant(
    "head_dim was computed as hidden_size / heads",
    "many models choose it freely: config.head_dim is the number that counts.",
)
def derived_head_dim(config, batch, seq, bytes_each):
    width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    return 2 * config.num_hidden_layers * batch * seq * width * bytes_each


@cache_bytes.mutant("queries are counted as well", "a query is used once, in its own pass, and not kept.")
def queries_too(config, batch, seq, bytes_each):
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return config.num_hidden_layers * batch * seq * width * bytes_each


@cache_bytes.mutant("q is counted as a third tensor", "a query is used once, in its own pass: k and v are kept.")
def three_tensors(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, batch, seq, bytes_each) // 2 * 3


@cache_bytes.mutant(
    "the numbers of MiniMind-3 are written in",
    "other models have other layers and heads: read them from config.",
)
def fixed_model(config, batch, seq, bytes_each):
    return cache_bytes_reference(MiniMindConfig(), batch, seq, bytes_each)


@cache_bytes.mutant("these are numbers, not bytes", "multiply by bytes_each: 4 for float32, 2 for bfloat16.")
def numbers_not_bytes(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, batch, seq, 1)


@cache_bytes.mutant("these are bits, not bytes", "bytes_each counts bytes already: nothing to multiply by 8.")
def bits(config, batch, seq, bytes_each):
    return 8 * cache_bytes_reference(config, batch, seq, bytes_each)


@cache_bytes.mutant("the batch is forgotten", "every text of the batch has a past of its own.")
def one_text(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, 1, seq, bytes_each)


@cache_bytes.mutant("the length of the text is forgotten", "that is one token's share; each of the seq tokens stays.")
def one_token(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, batch, 1, bytes_each)


@cache_bytes.mutant(
    "the length counts squared",
    "the scores form a table of seq x seq, but they are not kept. Keys and values grow in step with the text.",
)
def squared(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, batch, seq, bytes_each) * seq


@cache_bytes.mutant("head_dim is forgotten", "each head's key is a vector of head_dim numbers.")
def no_head_dim(config, batch, seq, bytes_each):
    return cache_bytes_reference(config, batch, seq, bytes_each) // config.head_dim


# 4. generate ---------------------------------------------------------------------------------------------------------


class TinyModel(MiniMindForCausalLM):
    """A model of 2 layers whose random weights are large enough to make it talkative; always the same.

    It takes no more positions in one pass than the longest prompt has. So who feeds the whole text each time can't pass
    by counting only what is new.
    """

    longest = 9

    def __init__(self):
        config = MiniMindConfig(
            hidden_size=32,
            num_hidden_layers=2,
            vocab_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            initializer_range=0.3,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(config)
        self.eval().requires_grad_(False)

    def forward(self, input_ids, *arguments, **options):
        if input_ids.shape[1] > self.longest:
            raise ValueError(
                f"{input_ids.shape[1]} positions in one pass, more than any prompt here has: feed only what is new"
            )
        return super().forward(input_ids, *arguments, **options)

    def __repr__(self):
        return "a random model of 2 layers"


TINY = TinyModel()


def generate_reference(model, ids, n):
    """ids: [batch, seq]. Returns the longer ids [batch, seq + n] and how many positions went through the model."""
    past, new, fed = None, ids, 0
    for _ in range(n):
        output = model(new, past_key_values=past, use_cache=True)
        past, fed = output.past_key_values, fed + new.shape[1]
        new = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
    return ids, fed


generate = Exercise(
    name="05_kv_cache.generate",
    title="Write n tokens greedily, and feed only what is new",
    signature="generate(model, ids, n)",
    reference=generate_reference,
    returns=("ids", "fed"),
    cases=[
        case("a prompt of two tokens, three new ones", TINY, torch.tensor([[5, 7]]), 3),
        case("a prompt of four tokens, one new one", TINY, torch.tensor([[7, 1, 30, 4]]), 1),
        case("two prompts of five tokens, six new ones", TINY, torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]]), 6),
        case("a prompt of nine tokens, ten new ones", TINY, torch.tensor([[11, 2, 29, 17, 3, 23, 5, 31, 13]]), 10),
    ],
)


def greedy(logits):
    return logits.argmax(dim=-1, keepdim=True)


@generate.mutant(
    "the whole text is fed in each pass, although the past holds it already",
    "the old tokens then stand in the cache twice, at positions they never had. Behind a past, feed only the new one.",
)
def all_again_with_cache(model, ids, n):
    past, fed = None, 0
    for _ in range(n):
        output = model(ids, past_key_values=past, use_cache=True)
        past, fed = output.past_key_values, fed + ids.shape[1]
        ids = torch.cat([ids, greedy(output.logits[:, -1])], dim=1)
    return ids, fed


@generate.mutant(
    "the cache is never handed back: past stays None",
    "each pass then sees one token and nothing before it. Set past = output.past_key_values.",
)
def past_not_handed_back(model, ids, n):
    new, fed = ids, 0
    for _ in range(n):
        output = model(new, use_cache=True)
        fed, new = fed + new.shape[1], greedy(output.logits[:, -1])
        ids = torch.cat([ids, new], dim=1)
    return ids, fed


@generate.mutant(
    "the past stays that of the prompt",
    "it must grow with each pass: the second new token has to see the first. Take the past of every output.",
)
def past_of_the_prompt(model, ids, n):
    past, new, fed = None, ids, 0
    for _ in range(n):
        output = model(new, past_key_values=past, use_cache=True)
        past = output.past_key_values if past is None else past
        fed, new = fed + new.shape[1], greedy(output.logits[:, -1])
        ids = torch.cat([ids, new], dim=1)
    return ids, fed


@generate.mutant(
    "the first position's logits are read",
    "they say what follows the first token of the prompt. What follows the text stands in logits[:, -1].",
)
def first_logits(model, ids, n):
    past, new, fed = None, ids, 0
    for _ in range(n):
        output = model(new, past_key_values=past, use_cache=True)
        past, fed = output.past_key_values, fed + new.shape[1]
        new = greedy(output.logits[:, 0])
        ids = torch.cat([ids, new], dim=1)
    return ids, fed


@generate.mutant(
    "there is no cache: the whole text goes through the model for each token",
    "the tokens are right, but the work grows with the square of the length. Keep the past, feed one token.",
)
def no_cache(model, ids, n):
    fed = 0
    for _ in range(n):
        fed += ids.shape[1]
        ids = torch.cat([ids, greedy(model(ids).logits[:, -1])], dim=1)
    return ids, fed


@generate.mutant(
    "there is no cache, and fed counts only the new tokens",
    "fed must tell the truth: the whole text goes through the model each time. Keep the past, feed one token.",
)
def no_cache_counted_as_one(model, ids, n):
    longer = no_cache(model, ids, n)[0]
    return longer, ids.shape[1] + n - 1


@generate.mutant(
    "the whole text is fed behind its own past, and fed counts only the new tokens",
    "the old tokens then stand in the cache twice. Behind a past, feed only the new one.",
)
def all_again_counted_as_one(model, ids, n):
    return all_again_with_cache(model, ids, n)[0], ids.shape[1] + n - 1


@generate.mutant(
    "the new token has lost an axis",
    "argmax drops the axis that it reads: [batch] where [batch, 1] is wanted. keepdim=True keeps it.",
)
def axis_lost(model, ids, n):
    new = model(ids, use_cache=True).logits[:, -1].argmax(dim=-1)
    return torch.cat([ids, new], dim=1), ids.shape[1] + n - 1


@generate.mutant(
    "fed counts the positions of all texts together",
    "it counts those of one text: new.shape[1]. The texts of a batch go through side by side.",
)
def all_texts_counted(model, ids, n):
    longer, fed = generate_reference(model, ids, n)
    return longer, fed * ids.shape[0]


@generate.mutant(
    "the last token of the prompt is fed twice",
    "the pass over the prompt has read it already, and its logits name the first new token.",
)
def last_fed_twice(model, ids, n):
    past, new, fed = model(ids, use_cache=True).past_key_values, ids[:, -1:], ids.shape[1]
    for _ in range(n):
        output = model(new, past_key_values=past, use_cache=True)
        past, fed = output.past_key_values, fed + 1
        new = greedy(output.logits[:, -1])
        ids = torch.cat([ids, new], dim=1)
    return ids, fed


@generate.mutant(
    "the last new token is fed as well",
    "nobody needs what follows it: n tokens take the prompt and n - 1 tokens through the model.",
)
def last_fed_for_nothing(model, ids, n):
    longer, fed = generate_reference(model, ids, n)
    return longer, fed + 1


@generate.mutant(
    "fed counts passes, not positions",
    "the pass over the prompt takes all its positions through the model at once: add new.shape[1].",
)
def passes_counted(model, ids, n):
    return generate_reference(model, ids, n)[0], n


@generate.mutant(
    "the prompt is missing in the result", "return prompt and new tokens together, as core's generate does."
)
def new_only(model, ids, n):
    longer, fed = generate_reference(model, ids, n)
    return longer[:, ids.shape[1] :], fed


@generate.mutant(
    "one token is missing at the end",
    "the pass over the prompt gives the first new token already: n passes, n tokens.",
)
def one_short(model, ids, n):
    return generate_reference(model, ids, n - 1)


@generate.mutant(
    "there is one token too many",
    "the pass over the prompt gives the first new token already: n - 1 more passes are enough.",
)
def one_too_many(model, ids, n):
    return generate_reference(model, ids, n + 1)


@generate.mutant(
    "the least likely token is taken", "greedy takes the largest logit: argmax over the vocabulary, the last axis."
)
def least_likely(model, ids, n):
    past, new, fed = None, ids, 0
    for _ in range(n):
        output = model(new, past_key_values=past, use_cache=True)
        past, fed = output.past_key_values, fed + new.shape[1]
        new = output.logits[:, -1].argmin(dim=-1, keepdim=True)
        ids = torch.cat([ids, new], dim=1)
    return ids, fed


@generate.mutant(
    "only the last token of the prompt is fed",
    "the model then never sees the rest of the prompt. The first pass takes all of it.",
)
def prompt_not_read(model, ids, n):
    longer, fed = generate_reference(model, ids[:, -1:], n)
    return torch.cat([ids[:, :-1], longer], dim=1), fed


EXERCISES = [append, decode_step, cache_bytes, generate]
