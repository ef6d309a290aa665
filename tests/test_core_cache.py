"""The key/value cache: every split gives the same numbers, a past never changes, and nothing of it is copied."""

import copy

import pytest
import torch
from reference import gradients, largest_difference, random_ids, tiny_model

from minimind_core import LayerCache, new_cache

PATHS = pytest.mark.parametrize("flash_attn", [True, False], ids=["fast", "explicit"])


def snapshot(past) -> list[torch.Tensor]:
    return [value.clone() for layer in past for value in layer]


def equal_now(past, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(now, then) for now, then in zip((v for layer in past for v in layer), before, strict=True))


@PATHS
@pytest.mark.parametrize("variant", [{}, {"use_moe": True, "num_experts_per_tok": 2}], ids=["dense", "moe"])
def test_every_split(flash_attn, variant):
    model, ids = tiny_model(flash_attn=flash_attn, **variant), random_ids()
    with torch.no_grad():
        full = model(ids).logits
        for cut in range(1, 12):
            first = model(ids[:, :cut], use_cache=True)
            second = model(ids[:, cut:], past_key_values=first.past_key_values, use_cache=True)
            assert largest_difference(torch.cat([first.logits, second.logits], 1), full) < 1e-5, cut


@PATHS
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 4, 3], [1, 10, 1], [3, 3, 3, 3]])
def test_chunked_prefill(flash_attn, sizes):
    model, ids = tiny_model(flash_attn=flash_attn), random_ids()
    with torch.no_grad():
        past, logits = new_cache(2, 12), []
        for chunk in ids.split(sizes, dim=1):
            output = model(chunk, past_key_values=past, use_cache=True)
            past = output.past_key_values
            logits.append(output.logits)
        assert largest_difference(torch.cat(logits, 1), model(ids).logits) < 1e-5
        assert past[0][0].shape == (2, 12, 2, 16)  # [batch, seq, kv_heads, head_dim]: the small number of heads


@pytest.mark.parametrize("capacity", [0, 64])
def test_two_continuations_branch_from_one_past(capacity):
    model, ids = tiny_model(), random_ids(1, 8)
    tails = [random_ids(1, 4, seed) for seed in (1, 2)]
    with torch.no_grad():
        wanted = [model(torch.cat([ids, tail], 1)).logits[:, 8:] for tail in tails]
        root = model(ids, past_key_values=new_cache(2, capacity), use_cache=True).past_key_values
        before = snapshot(root)
        pasts, logits = [root, root], [[], []]
        for step in range(4):  # in turns, one token each
            for i, tail in enumerate(tails):
                output = model(tail[:, step : step + 1], past_key_values=pasts[i], use_cache=True)
                pasts[i] = output.past_key_values
                logits[i].append(output.logits)
        for found, want in zip(logits, wanted, strict=True):
            assert largest_difference(torch.cat(found, 1), want) < 1e-5
        assert equal_now(root, before)
        again = model(tails[0], past_key_values=root).logits  # one after the other, without keeping the result
        assert largest_difference(again, wanted[0]) < 1e-5
        assert equal_now(root, before)


def test_appending_copies_nothing_of_the_past():
    """65 appended positions: storage that doubles is filled anew at most a few times, with room not once."""
    cache, addresses = new_cache(1, 66)[0], set()
    doubling, moves = LayerCache(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)), set()
    with torch.no_grad():
        for _ in range(65):
            new = torch.randn(1, 1, 2, 4)
            cache, doubling = cache.append(new, new), doubling.append(new, new)
            addresses.add(cache[0].untyped_storage().data_ptr())
            moves.add(doubling[0].untyped_storage().data_ptr())
    assert cache.length == 65
    assert len(addresses) == 1
    assert len(moves) <= 7


def test_generation_like_loop_writes_in_place():
    model, ids = tiny_model(), random_ids(1, 4)
    with torch.no_grad():
        past = model(ids, past_key_values=new_cache(2, 20), use_cache=True).past_key_values
        start = [value.data_ptr() for layer in past for value in layer]
        for _ in range(16):
            past = model(ids[:, :1], past_key_values=past, use_cache=True).past_key_values
    assert [value.data_ptr() for layer in past for value in layer] == start
    assert past[0].length == 20


@PATHS
def test_gradients_flow_through_a_cached_past(flash_attn):
    model, ids = tiny_model(flash_attn=flash_attn), random_ids()
    model(ids).logits.square().mean().backward()
    wanted = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.cat([first.logits, second.logits], 1).square().mean().backward()
    for name, grad in gradients(model).items():
        assert largest_difference(grad, wanted[name]) < 1e-4, name


def test_training_may_follow_a_past_without_gradients_and_back():
    model, ids = tiny_model(), random_ids()
    with torch.no_grad():
        full = model(ids).logits
        past = model(ids[:, :4], past_key_values=new_cache(2, 32), use_cache=True).past_key_values
    before = snapshot(past)
    middle = model(ids[:, 4:8], past_key_values=past, use_cache=True)
    with torch.no_grad():
        end = model(ids[:, 8:], past_key_values=middle.past_key_values, use_cache=True)
        model(ids[:, 8:], past_key_values=past, use_cache=True)  # writes behind the shared past
    middle.logits.square().mean().backward()
    assert largest_difference(torch.cat([middle.logits, end.logits], 1), full[:, 4:]) < 1e-5
    assert equal_now(past, before)
    gradients(model)


def test_inference_mode_and_no_grad_mix():
    model, ids = tiny_model(), random_ids()
    with torch.inference_mode():
        full = model(ids).logits
        first = model(ids[:, :4], past_key_values=new_cache(2, 32), use_cache=True)
    with torch.no_grad():
        second = model(ids[:, 4:8], past_key_values=first.past_key_values, use_cache=True)
    with torch.inference_mode():
        third = model(ids[:, 8:], past_key_values=second.past_key_values, use_cache=True)
    found = torch.cat([first.logits, second.logits, third.logits], 1)
    assert largest_difference(found, full) < 1e-5


def test_pairs_of_tensors_serve_as_past():
    model, ids = tiny_model(), random_ids()
    with torch.no_grad():
        full = model(ids).logits
        past = model(ids[:, :7], use_cache=True).past_key_values
        assert len(past) == 2 and len(past[0]) == 2
        k, v = past[0]
        assert torch.equal(k, past[0][0]) and torch.equal(v, past[0][1]) and torch.equal(v, past[0][-1])
        pairs = [tuple(value.clone() for value in layer) for layer in past]
        assert largest_difference(model(ids[:, 7:], past_key_values=pairs).logits, full[:, 7:]) < 1e-5


def test_cache_only_where_asked():
    model, ids = tiny_model(), random_ids()
    assert model(ids).past_key_values is None
    past = model(ids[:, :7], use_cache=True).past_key_values
    assert model(ids[:, 7:], past_key_values=past).past_key_values is None


def test_a_cache_can_be_copied():
    with torch.no_grad():
        past = tiny_model()(random_ids(), past_key_values=new_cache(2, 32), use_cache=True).past_key_values
        twin = copy.deepcopy(past)
        new = torch.ones(2, 1, 2, 16)
        twin[0].append(new, new)
        assert past[0].append(2 * new, new)[0][:, -1].eq(2).all()


def test_another_batch_or_type_is_refused():
    model, ids = tiny_model(), random_ids()
    past = model(ids[:, :7], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"\[2, 7, 2, 16\].*\[1, 5, 2, 16\]"):
        model(ids[:1, 7:], past_key_values=past)
    with pytest.raises(ValueError, match=r"float32.*bfloat16"):
        tiny_model().bfloat16()(ids[:, 7:], past_key_values=past)
    with pytest.raises(ValueError, match=r"1 entries.*2 layers"):
        model(ids[:, 7:], past_key_values=past[:1])


def test_empty_cache_says_so():
    with pytest.raises(ValueError, match="empty"):
        LayerCache()[0]
    with pytest.raises(IndexError, match="2"):
        LayerCache(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))[2]


def test_positions_past_the_table():
    model = tiny_model(max_position_embeddings=10)
    with pytest.raises(ValueError, match=r"0 to 11 .* ends at 9"):
        model(random_ids())
    past = model(random_ids(seq=10), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"10 to 10 .* ends at 9"):
        model(random_ids(seq=1), past_key_values=past)
