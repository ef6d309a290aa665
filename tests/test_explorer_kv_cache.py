"""What the cache explorer draws must be true: each cell and each total against a plain simulation, and a real cache."""

import itertools

import pytest
import torch

from minimind_core import MiniMindConfig, MiniMindForCausalLM
from minimind_core.explorers import kv_cache

KIND = {name: number for number, name in enumerate(kv_cache.KINDS)} | {"empty": kv_cache.EMPTY}
STATES = list(itertools.product((1, 2, 3, 7, 13), (1, 5, 8, 12), (1, 3, 4, 12), (1, 4), (True, False)))


def passes(prompt: int, chunk: int) -> list[tuple[int, int]]:
    """(tokens before, tokens after) of each pass: the prompt in chunks, then token by token."""
    done, found = 0, []
    while len(found) < kv_cache.PASSES:
        new = min(chunk, prompt - done) if done < prompt else 1
        found.append((done, done + new))
        done += new
    return found


def cell(query: int, key: int, start: int, end: int, cache: bool) -> str:
    """What the score of this query and key is in a pass over the tokens start to end - 1, cached or not."""
    if query >= end or key >= end:
        return "empty"
    if cache and query < start:
        return "past" if key <= query else "empty"
    if key > query:
        return "masked"
    if not cache:
        return "again" if query < start else "new"
    return "cached" if key < start else "new"


@pytest.mark.parametrize("step, prompt, chunk, kv_heads, cache", STATES)
def test_numbers_follow_a_simulation(step, prompt, chunk, kv_heads, cache):
    n = kv_cache.compute(step, prompt, chunk, kv_heads, cache).numbers
    ran = passes(prompt, chunk)[:step]
    start, end = ran[-1]
    for query, key in itertools.product(range(kv_cache.TOKENS), repeat=2):
        assert n["table"][query, key] == KIND[cell(query, key, start, end, cache)], (query, key)
    old = ("past", "cached") if cache else ("again", "again")
    for position in range(kv_cache.TOKENS):
        now = "new" if start <= position < end else "empty"
        query, slot = old if position < start else (now, now)
        assert (n["queries"][position], n["slots"][position]) == (KIND[query], KIND[slot])
    a_token = 2 * 8 * kv_heads * 96 * 4
    assert tuple(n["token_layers"]) == (8 * sum(b - a for a, b in ran), 8 * sum(b for _, b in ran))
    assert tuple(n["scores"]) == (sum((b - a) * b for a, b in ran), sum(b * b for _, b in ran))
    assert tuple(n["read"]) == (a_token * sum(a for a, _ in ran), 0)
    assert tuple(n["kept"]) == (a_token * end, 0)


def test_totals_are_those_of_a_real_model():
    """A model of the same depth: what its layers are fed and what its cache holds is what the explorer counts."""
    config = MiniMindConfig(
        hidden_size=16, num_attention_heads=8, num_key_value_heads=4, vocab_size=16, head_dim=96, intermediate_size=8
    )
    model, ids, fed = MiniMindForCausalLM(config).eval(), torch.arange(16)[None], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: fed.append(inputs[0].shape[1]))
    past = None
    with torch.no_grad():
        for step, (start, end) in enumerate(passes(prompt=8, chunk=3), 1):
            if end > 16:
                break
            past = model(ids[:, start:end], past_key_values=past, use_cache=True).past_key_values
            n = kv_cache.compute(step, 8, 3, 4, True).numbers
            assert sum(fed) == n["token_layers"][0]
            assert sum(x.numel() * x.element_size() for layer in past for x in layer) == n["kept"][0]
    assert step > 8


def test_presets_show_what_they_say():
    n = {name: kv_cache.compute(**({"kv_heads": 4} | values)).numbers for name, values in kv_cache.PRESETS.items()}
    assert n["prefill"]["start"] == 0 and n["prefill"]["rows"] == (0, 12)
    assert n["first new token"]["rows"] == (12, 13)
    assert n["late token"]["rows"] == (23, 24) and n["no cache"]["rows"] == (0, 24)
    assert n["chunked prefill"]["rows"] == (8, 12) and KIND["masked"] in n["chunked prefill"]["table"]
