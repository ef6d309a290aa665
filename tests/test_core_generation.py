"""Generation: the filters against transformers' own, the cache, padding, ends of text, and refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import random_ids, tiny_model, to_transformers

from minimind_core import keep_top_k, keep_top_p, next_token_probs, penalize_repetition

LOGITS = 3 * torch.randn(4, 97, generator=torch.Generator().manual_seed(0))
GREEDY = {"do_sample": False, "eos_token_id": None}


def drawn(model, ids, seed=0, **settings) -> torch.Tensor:
    return model.generate(ids, generator=torch.Generator().manual_seed(seed), **settings)


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize("k", [1, 5, 96, 97, 500])
def test_top_k_equals_transformers(k):
    from transformers import TopKLogitsWarper

    wanted = TopKLogitsWarper(k)(None, LOGITS.clone())
    assert torch.equal(keep_top_k(LOGITS, k), wanted)
    assert keep_top_k(LOGITS, k).isfinite().sum(-1).tolist() == [min(k, 97)] * 4


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.85, 0.9, 0.999, 1.0])
def test_top_p_equals_transformers(p):
    from transformers import TopPLogitsWarper

    assert torch.equal(keep_top_p(LOGITS, p), TopPLogitsWarper(p)(None, LOGITS.clone()))


def test_top_p_keeps_the_token_that_crosses():
    logits = torch.tensor([[0.5, 0.41, 0.09]]).log()
    assert keep_top_p(logits, 0.9).isfinite().tolist() == [[True, True, False]]
    assert keep_top_p(logits, 0.92).isfinite().all()
    assert keep_top_p(logits, 1e-9).isfinite().tolist() == [[True, False, False]]
    assert keep_top_p(logits.flip(-1), 0.6).isfinite().tolist() == [[False, True, True]]  # in the order of the input


def test_top_k_of_0_keeps_all():
    assert keep_top_k(LOGITS, 0) is LOGITS


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_penalty_equals_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = torch.randint(97, (4, 30), generator=torch.Generator().manual_seed(1))
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, LOGITS.clone())
    assert torch.equal(penalize_repetition(LOGITS, ids, penalty), wanted)


def test_repetition_penalty_lowers_negative_logits_too():
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    assert penalize_repetition(logits, torch.tensor([[0, 1]]), 2.0).tolist() == [[1.0, -4.0, 1.0]]


def test_repetition_penalty_ignores_padding():
    logits, ids = torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 0, 1]])
    assert penalize_repetition(logits, ids, 2.0, torch.tensor([[0, 0, 1]])).tolist() == [[2.0, -4.0, 1.0]]
    assert penalize_repetition(logits, ids, 2.0, torch.tensor([[0, 1, 1]])).tolist() == [[1.0, -4.0, 1.0]]
    assert penalize_repetition(logits, ids, 2.0, torch.tensor([[1, 0, 1]])).tolist() == [[1.0, -4.0, 1.0]]


@pytest.mark.parametrize(("temperature", "k", "p"), [(0.85, 50, 0.85), (0.5, 0, 0.9), (2.0, 7, 1.0), (1.0, 3, 0.2)])
def test_next_token_probs_equal_transformers(temperature, k, p):
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    steps = [TemperatureLogitsWarper(temperature)]  # in transformers' order
    steps += [TopKLogitsWarper(k)] if k else []
    steps += [TopPLogitsWarper(p)] if p < 1 else []
    wanted = LogitsProcessorList(steps)(None, LOGITS.clone()).softmax(-1)
    assert torch.allclose(next_token_probs(LOGITS, temperature, k, p), wanted, atol=1e-7)
    assert next_token_probs(LOGITS.half(), temperature, k, p).dtype == torch.float32
    with pytest.raises(ValueError, match="temperature is 0"):
        next_token_probs(LOGITS, 0, k, p)


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("kind", [{}, {"flash_attn": False}, {"use_moe": True, "num_experts_per_tok": 2}])
def test_greedy_equals_transformers_with_and_without_cache(kind):
    model, ids = tiny_model(**kind), random_ids(seq=6)
    with_cache = model.generate(ids, max_new_tokens=12, **GREEDY)
    assert with_cache.shape == (2, 18)
    assert torch.equal(with_cache[:, :6], ids)
    assert torch.equal(with_cache, model.generate(ids, max_new_tokens=12, use_cache=False, **GREEDY))
    theirs = to_transformers(model)
    mask = torch.ones_like(ids)
    wanted = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    eos = model.config.eos_token_id
    assert not (with_cache[:, 6:] == eos).any(), "choose another seed: transformers was kept from writing eos"
    assert torch.equal(with_cache, wanted)


def test_temperature_0_is_greedy():
    model, ids = tiny_model(), random_ids()
    greedy = model.generate(ids, max_new_tokens=5, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=5, temperature=0, eos_token_id=None), greedy)
    assert torch.equal(model.generate(ids, max_new_tokens=5, top_k=1, eos_token_id=None), greedy)
    loose = drawn(model, ids, max_new_tokens=5, temperature=50.0, top_k=0, top_p=1.0, eos_token_id=None)
    assert not torch.equal(loose, greedy)


@pytest.mark.parametrize("kind", [{}, {"use_moe": True, "num_experts_per_tok": 2}], ids=["dense", "moe"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padded_batch_equals_single_prompts(kind, dtype, use_cache):
    model = tiny_model(**kind)
    prompts = [random_ids(1, length, seed=length) for length in (3, 7, 5)]
    batch = torch.cat([F.pad(prompt, (7 - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([F.pad(torch.ones_like(prompt), (7 - prompt.shape[1], 0)) for prompt in prompts]).to(dtype)
    settings = {"max_new_tokens": 8, "repetition_penalty": 1.3, "use_cache": use_cache, **GREEDY}
    together = model.generate(batch, mask, **settings)
    for row, prompt in zip(together, prompts, strict=True):
        assert row[7:].tolist() == model.generate(prompt, **settings)[0, prompt.shape[1] :].tolist()


def test_the_penalty_of_generate_ignores_padding():
    """Padded with the very token that comes next: were padding counted, the penalty would push it away."""
    model, prompt = tiny_model(), random_ids(1, 6)
    settings = {"max_new_tokens": 4, "repetition_penalty": 5.0, **GREEDY}
    alone = model.generate(prompt, **settings)[0, 6:].tolist()
    assert alone[0] not in prompt
    padded = F.pad(prompt, (3, 0), value=alone[0])
    mask = F.pad(torch.ones_like(prompt), (3, 0))
    assert model.generate(padded, mask, **settings)[0, 9:].tolist() == alone


def test_sequences_of_one_prompt_stand_together():
    model, ids = tiny_model(), random_ids(seq=5)
    mask = torch.ones(2, 5)
    mask[0, :2] = 0
    out = drawn(model, ids, attention_mask=mask, max_new_tokens=6, num_return_sequences=3, temperature=1.5)
    assert out.shape == (6, 11)
    assert torch.equal(out[:, :5], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in out[:3].tolist()}) > 1
    greedy = model.generate(ids, mask, max_new_tokens=6, num_return_sequences=3, **GREEDY)
    assert torch.equal(greedy, model.generate(ids, mask, max_new_tokens=6, **GREEDY).repeat_interleave(3, dim=0))


def test_a_finished_row_is_filled_with_eos():
    model, ids = tiny_model(), random_ids(seq=6)
    free = model.generate(ids, max_new_tokens=12, **GREEDY)
    eos = free[0, 8].item()  # the third new token of the first row
    assert eos not in free[0, 6:8]
    stopped = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=eos)
    for found, wanted in zip(stopped[:, 6:].tolist(), free[:, 6:].tolist(), strict=True):
        end = wanted.index(eos) + 1 if eos in wanted else 12
        assert found[:end] == wanted[:end][: len(found)]
        assert set(found[end:]) <= {eos}
    alone = model.generate(ids[:1], max_new_tokens=12, do_sample=False, eos_token_id=eos)
    assert alone.shape == (1, 9)  # stops when every row has finished


def test_several_ends_of_text():
    model, ids = tiny_model(), random_ids(1, 6)
    free = model.generate(ids, max_new_tokens=12, **GREEDY)[0, 6:].tolist()
    stops = [96 if 96 not in free else 95, free[4]]
    out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=stops)
    assert out[0, 6:].tolist() == free[: free.index(free[4]) + 1]


def test_the_configs_eos_stops_unless_none():
    model, ids = tiny_model(), random_ids(1, 6)
    second = model.generate(ids, max_new_tokens=2, **GREEDY)[0, 7].item()
    other = tiny_model(eos_token_id=second)
    assert other.generate(ids, max_new_tokens=12, do_sample=False).shape[1] <= 8
    assert other.generate(ids, max_new_tokens=12, **GREEDY).shape[1] == 18


def test_eos_may_be_the_padding_token():
    model = tiny_model(eos_token_id=0)
    ids, mask = F.pad(random_ids(2, 4), (3, 0)), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    wanted = tiny_model().generate(ids, mask, max_new_tokens=6, **GREEDY)
    assert 0 not in wanted[:, 7:]
    assert torch.equal(model.generate(ids, mask, max_new_tokens=6, do_sample=False), wanted)


def test_the_generator_decides_the_draws():
    model, ids = tiny_model(), random_ids()
    settings = {"max_new_tokens": 8, "eos_token_id": None, "temperature": 1.5}
    assert torch.equal(drawn(model, ids, 0, **settings), drawn(model, ids, 0, **settings))
    assert not torch.equal(drawn(model, ids, 0, **settings), drawn(model, ids, 1, **settings))
    assert torch.equal(drawn(model, ids, 0, **settings), drawn(model, ids, 0, use_cache=False, **settings))
    torch.manual_seed(7)
    first = model.generate(ids, **settings)
    torch.manual_seed(7)
    assert torch.equal(model.generate(ids, **settings), first)


def test_draws_follow_the_probabilities():
    model, ids = tiny_model(), random_ids(1, 4)
    with torch.no_grad():
        probs = next_token_probs(model(ids).logits[:, -1], 1.0, 4, 1.0)[0]
    out = drawn(model, ids, max_new_tokens=1, num_return_sequences=4000, temperature=1.0, top_k=4, top_p=1.0)
    shares = out[:, -1].bincount(minlength=97) / 4000
    assert (shares - probs).abs().max() < 4 * 0.5 / math.sqrt(4000)
    assert (shares[probs == 0] == 0).all()


class Recorder:
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.clone())

    def end(self):
        self.ended += 1


def test_streamer_gets_the_prompt_then_each_token():
    model, ids, recorder = tiny_model(), random_ids(), Recorder()
    out = model.generate(ids, max_new_tokens=5, streamer=recorder, **GREEDY)
    assert recorder.ended == 1
    assert torch.equal(recorder.values[0], ids)
    assert [value.shape for value in recorder.values[1:]] == [(2,)] * 5
    assert torch.equal(torch.stack(recorder.values[1:], dim=1), out[:, 12:])


def test_streamer_ends_after_an_error_too():
    class Breaks(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.values) == 3:
                raise KeyboardInterrupt

    model, recorder = tiny_model().train(), Breaks()
    with pytest.raises(KeyboardInterrupt):
        model.generate(random_ids(), max_new_tokens=5, streamer=recorder, **GREEDY)
    assert recorder.ended == 1
    assert model.training


def test_it_fits_transformers_streamer():
    from transformers import TextStreamer

    class Letters:
        def decode(self, ids, **settings):
            return "".join(chr(i % 26 + 97) + " " for i in ids)

    seen = []

    class Collect(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            seen.append(text)

    model, ids = tiny_model(), random_ids(1, 6)
    out = model.generate(ids, max_new_tokens=5, streamer=Collect(Letters(), skip_prompt=True), **GREEDY)
    assert "".join(seen) == Letters().decode(out[0, 6:].tolist())


def test_modes_and_gradients_are_left_alone():
    model = tiny_model(dropout=0.5).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(0)
    first = model.generate(random_ids(), max_new_tokens=5, **GREEDY)
    assert torch.equal(first, model.generate(random_ids(), max_new_tokens=5, **GREEDY))  # without dropout
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_returned_ids_can_be_trained_on():
    model, ids = tiny_model(), random_ids()
    out = drawn(model, ids, max_new_tokens=5)
    assert out.dtype == torch.int64
    model(out, labels=out).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    assert torch.equal(ids, random_ids())  # the prompt itself is not written to


@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double])
@pytest.mark.parametrize("kind", [{}, {"use_moe": True}], ids=["dense", "moe"])
def test_half_precision(change, kind):
    out = drawn(change(tiny_model(**kind)), random_ids(), max_new_tokens=6, eos_token_id=None, repetition_penalty=1.2)
    assert out.shape == (2, 18)


def test_inference_mode_and_int32_and_empty_batch():
    model, ids = tiny_model(), random_ids()
    wanted = model.generate(ids, max_new_tokens=5, **GREEDY)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, max_new_tokens=5, **GREEDY), wanted)
    narrow = model.generate(ids.int(), max_new_tokens=5, **GREEDY)
    assert torch.equal(narrow.long(), wanted)
    for kind in ({}, {"use_moe": True}):
        assert tiny_model(**kind).generate(ids[:0], max_new_tokens=5).shape[0] == 0


def test_the_whole_table_can_be_filled():
    model = tiny_model(max_position_embeddings=16)
    assert model.generate(random_ids(), max_new_tokens=4, **GREEDY).shape == (2, 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 117}, "12 tokens and max_new_tokens 117 .*128 positions.* at most 116"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"eos_token_id": 97}, "97.*97 tokens"),
        ({"attention_mask": torch.ones(2, 11)}, r"\[2, 11\].*\[2, 12\]"),
        ({"attention_mask": (torch.arange(12) < 9).expand(2, -1)}, "ends in padding"),
        ({"attention_mask": torch.full((2, 12), -math.inf)}, "-inf"),
    ],
)
def test_settings_out_of_range(settings, message):
    recorder = Recorder()
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(random_ids(), streamer=recorder, **{"max_new_tokens": 4, **settings})
    assert recorder.values == []  # at once, not after half of the work
