"""What the explorers of notebook 04 say must be true: heads and cache, masks, weights, each found anew here."""

import itertools
import math

import numpy as np
import pytest
import torch

from minimind_core import MiniMindConfig, MiniMindForCausalLM, new_cache, repeat_kv
from minimind_core.explorers import attention, gqa, masks

# --- gqa


@pytest.mark.parametrize("heads, kv_heads", [*itertools.product((1, 6, 7, 8, 12, 16), (1, 2, 4, 5, 8, 16))])
def test_sharing_is_that_of_repeat_kv(heads, kv_heads):
    n = gqa.compute(heads, kv_heads, 96, 8, 4096, "bfloat16").numbers
    used = max(n["kv_of"]) + 1
    assert used == max(d for d in range(1, heads + 1) if heads % d == 0 and d <= kv_heads)
    numbered = torch.arange(used).reshape(1, 1, used, 1)
    assert n["kv_of"] == repeat_kv(numbered, n["n_rep"]).flatten().tolist()


def test_a_number_that_does_not_divide_is_said():
    assert "8 query heads, 4 K/V heads (5 does not divide 8)" in gqa.compute(8, 5, 96, 8, 4096, "bfloat16").sentence
    assert "does not divide" not in gqa.compute(8, 4, 96, 8, 4096, "bfloat16").sentence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["MiniMind-3", "MQA", "MHA"])
def test_bytes_are_those_of_a_real_cache(preset, dtype):
    values = {"head_dim": 32, "layers": 3} | {
        key: value for key, value in gqa.PRESETS[preset].items() if key.startswith("num_")
    }
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    config = MiniMindConfig(
        hidden_size=64, head_dim=32, num_hidden_layers=3, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    model = MiniMindForCausalLM(config).to(getattr(torch, dtype))
    with torch.no_grad():
        past = model(torch.zeros(1, 256, dtype=torch.long), use_cache=True).past_key_values
    real = sum(tensor.numel() * tensor.element_size() for layer in past for tensor in layer)
    n = gqa.compute(**values, seq=256, dtype=dtype).numbers
    assert n["cache"][1] == real
    assert n["cache"][0] == real * heads // kv_heads
    assert n["cache"][2] * kv_heads == real


def test_minimind_3_takes_12288_bytes_per_token():
    sentence = gqa.explore().sentence
    assert "2 × 8 layers × 4 heads × 96 × 2 bytes = 12,288 bytes" in sentence
    assert "48 MiB, 2 times less than with MHA" in sentence


@pytest.mark.parametrize(
    "count, words", [(1000, "1e+03 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (2**38, "256 GiB")]
)
def test_sizes_in_words(count, words):
    assert gqa.size(count) == words.replace("1e+03", "1,000")


# --- masks


def by_hand(n: dict) -> np.ndarray:
    """Query sees key: not later, not padding, same document where there are several; a row of nothing sees itself."""
    document, cached, new = n["document"], n["cached"], n["why"].shape[0]
    several = max(document) > 0
    rows = []
    for query in range(cached, cached + new):
        row = [
            key <= query and document[key] >= 0 and (not several or document[key] == document[query])
            for key in range(cached + new)
        ]
        rows.append(row if any(row) else [key == query for key in range(cached + new)])
    return np.array(rows)


@pytest.mark.parametrize("documents", [1, 2, 3])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_masks(side, documents):
    for new, cached, padding in itertools.product((1, 2, 5, 12), (0, 1, 4, 12), (1, 3, 8)):
        check_mask(new, cached, side, padding, documents)


def check_mask(new, cached, side, padding, documents):
    result = masks.compute(new, cached, side, padding, documents)
    n, sentence = result.numbers, result.sentence
    why, document = n["why"], np.array(n["document"])
    assert why.shape == (new, new + cached)
    allowed = np.isin(why, (masks.ALLOWED, masks.ITSELF))
    np.testing.assert_array_equal(allowed, by_hand(n))
    assert allowed.any(axis=-1).all(), "a row without any key gives NaN"
    assert f"{allowed.sum()} of {why.size} pair" in sentence

    alone = (why == masks.ITSELF).any(axis=-1).nonzero()[0] + cached
    assert n["alone"] == alone.tolist()
    assert ("without a key" in sentence) == bool(n["alone"])
    assert (document[alone] == -1).all(), "only padding can be left without a key"

    padded = (document == -1).nonzero()[0].tolist()
    assert len(padded) <= (0 if side == "none" else padding)
    if side == "left":
        assert padded == list(range(len(padded)))
    if side == "right" and padded:
        assert padded[-1] == (cached or new) - 1
        assert ("hole" in sentence) == (cached > 0)
    if len(padded) < padding and side != "none":
        assert f"room for {len(padded)} of {padding}" in sentence

    real = document[document >= 0]
    assert (np.diff(real) >= 0).all()
    sizes = np.bincount(real)
    assert len(sizes) == min(documents, len(real))
    assert sizes.max() - sizes.min() <= 1


def test_hidden_pairs_are_counted_by_their_reason():
    result = masks.compute(8, 0, "left", 3, 1)
    assert "21 padding, 25 whose key comes later" in result.sentence  # 3 * 8 - 3 given back; 5 * 8 - 15
    assert "rows 0 to 2 without a key" in result.sentence
    result = masks.compute(10, 0, "none", 2, 2)
    assert "45 whose key comes later, 25 in another document" in result.sentence


def test_mask_of_left_padding_gives_the_tokens_what_they_get_alone():
    """The picture's mask, given to the real model: the padded row says of its real tokens what the bare row says."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(hidden_size=64, num_hidden_layers=2, vocab_size=256)).eval()
    ids = torch.arange(3, 11)[None]
    for side, real in (("left", slice(3, None)), ("right", slice(None, 5))):
        mask = torch.tensor(masks.compute(8, 0, side, 3, 1).numbers["document"])[None] >= 0
        with torch.no_grad():
            padded, bare = model(ids, attention_mask=mask).logits[:, real], model(ids[:, real]).logits
        torch.testing.assert_close(padded, bare, rtol=1e-4, atol=1e-5)


# --- attention

TEXTS = ["the cat sat. the cat sat.", "a", "é 漢 🙂 $x$", "W" * 32]


def plain_weights(text: str, layer: int) -> np.ndarray:
    """[head, query, key] of a layer, from the cached keys: another way than the explorer's."""
    model = attention.model()
    caught = {}
    hook = model.model.layers[layer].self_attn.q_norm.register_forward_hook(lambda m, i, out: caught.update(q=out))
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        past = model(ids, past_key_values=new_cache(4, 0), use_cache=True).past_key_values
    hook.remove()
    k = past[layer][0][0].double()  # rotated: seq kv_heads head_dim
    q, seq, dim = caught["q"][0].double(), ids.shape[1], k.shape[-1]
    angle = np.arange(seq)[:, None] * model.config.rope_theta ** -(np.arange(0, dim, 2) / dim)
    turn = torch.tensor(np.cos(angle) + 1j * np.sin(angle))[:, None]
    pairs = torch.complex(q[..., : dim // 2], q[..., dim // 2 :]) * turn
    q = torch.cat([pairs.real, pairs.imag], dim=-1)
    result = np.zeros((q.shape[1], seq, seq))
    for head, query in itertools.product(range(q.shape[1]), range(seq)):
        scores = [(q[query, head] @ k[key, head // 2]).item() / math.sqrt(dim) for key in range(query + 1)]
        powers = np.exp(np.array(scores) - max(scores))
        result[head, query, : query + 1] = powers / powers.sum()
    return result


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("layer", [0, 3])
def test_weights_are_the_models(text, layer):
    drawn = attention.compute(text, layer, 5).numbers["weights"]
    np.testing.assert_allclose(drawn, plain_weights(text, layer), atol=1e-4)


@pytest.mark.parametrize("text, layer", [*itertools.product(TEXTS, range(4))])
def test_the_strongest_link_is_the_largest_weight(text, layer):
    for position in range(len(text.encode())):
        result = attention.compute(text, layer, position)
        n = result.numbers
        if position == 0:
            assert "can look only at itself" in result.sentence
            continue
        row = n["weights"][:, position]
        head, key = np.unravel_index(row.argmax(), row.shape)
        assert (n["head"], n["best"][n["head"]]) == (head, key)
        target = "itself" if key == position else attention.named(text, key)
        assert f"head {head} has the strongest link, to {target}, weight {row[head, key]:.2f}" in result.sentence
        for other in set(range(4)) - {head}:
            assert n["best"][other] == row[other].argmax()
            assert f"ead {other}: " in result.sentence


@pytest.mark.parametrize("preset, target", [("byte before", 19), ("word start", 2), ("brackets", 1), ("quotes", 4)])
def test_presets_show_what_they_are_named_for(preset, target):
    n = attention.compute(**attention.PRESETS[preset]).numbers
    assert n["best"][n["head"]] == target
    assert n["weights"][n["head"], n["query"], target] > 0.5


def test_bytes_of_one_character_are_named():
    assert attention.named("a é", 0) == "'a' at 0"
    assert attention.named("a é", 1) == "the space at 1"
    assert attention.named("a é", 3) == "byte 2 of 'é' at 3"
    assert attention.named("\t", 0) == "U+0009 at 0"


def test_long_and_short_texts_are_said():
    assert "(31 is beyond the end)" in attention.compute("abc", 0, 31).sentence
    long = attention.compute("🙂" * 9, 0, 3)
    assert "Only the first 32 bytes are read" in long.sentence
    assert len(long.numbers["bytes"]) == 32
    cut = attention.compute("é" * 15 + "🙂", 0, 3)  # 30 bytes, and a character that does not fit
    assert bytes(cut.numbers["bytes"]).decode() == "é" * 15


@pytest.mark.parametrize("char, shown", [("a", "a"), (" ", "␣"), ("$", "$"), ("漢", "□"), ("\t", "□"), ("\u0301", "□")])
def test_characters_that_the_font_lacks(char, shown):
    assert attention.drawable(char) == shown
