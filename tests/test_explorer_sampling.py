"""What the sampling explorer says must be true: its filters are transformers' filters, its texts are generate's."""

import math

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minimind_core.explorers import sampling
from minimind_core.toy import toy_model

PROMPT = "The following statement "
DEFAULTS = {key: control.default for key, control in sampling.CONTROLS.items()}
MINIMIND = {"temperature": 0.85, "top_k": 50, "top_p": 0.85, "penalty": 1.0}


@pytest.fixture(scope="module")
def model():
    return toy_model()


def last(**changes):
    """The last result of the work."""
    *_, (done, result) = sampling.work(**(DEFAULTS | changes))
    assert done == 1
    return result


@pytest.mark.parametrize("temperature", [0.05, 0.85, 2.0])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (50, 0.85), (1, 0.5), (3, 1.0), (256, 0.05), (7, 0.95)])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_distribution_equals_transformers(model, temperature, top_k, top_p, penalty):
    n = last(temperature=temperature, top_k=top_k, top_p=top_p, penalty=penalty).numbers
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        logits = model(ids).logits[:, -1]
    steps = [RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    steps += [TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    by_k = LogitsProcessorList(steps)(ids, logits.clone())[0]
    by_p = TopPLogitsWarper(top_p)(ids, by_k[None].clone())[0] if top_p < 1 else by_k
    own, left = logits[0].softmax(-1).numpy(), by_p.softmax(-1).numpy()
    shown, rest = n["bytes"], np.setdiff1d(np.arange(256), n["bytes"])
    np.testing.assert_allclose(n["own"], [*own[shown], own[rest].sum()], atol=1e-6)
    np.testing.assert_allclose(n["left"], [*left[shown], left[rest].sum()], atol=1e-6)
    np.testing.assert_allclose(n["mass"], by_k.softmax(-1).numpy()[shown].cumsum(), atol=1e-6)
    assert (n["k_left"], n["p_left"]) == (by_k.isfinite().sum(), by_p.isfinite().sum())
    assert math.isclose(sum(n["left"]), 1, abs_tol=1e-6) and (np.diff(n["left"][:-1]) <= 1e-9).all()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"seed": 7},
        {"temperature": 1.5, "top_k": 0, "top_p": 1.0},
        {"penalty": 1.3},
        {"temperature": 0.0},
        {"temperature": 0.0, "penalty": 1.5},
        {"prompt": "é 漢 🙂", "temperature": 1.0},
    ],
)
def test_texts_are_those_of_generate(model, changes):
    state = DEFAULTS | changes
    ids = torch.tensor([list(state["prompt"].encode())])
    wanted = model.generate(
        ids,
        max_new_tokens=sampling.BYTES,
        temperature=state["temperature"],
        top_k=state["top_k"],
        top_p=state["top_p"],
        repetition_penalty=state["penalty"],
        num_return_sequences=sampling.TEXTS,
        generator=torch.Generator().manual_seed(state["seed"]),
        eos_token_id=None,
    )[:, ids.shape[1] :]
    np.testing.assert_array_equal(last(**changes).numbers["texts"], wanted)


def test_what_was_read_before_does_not_matter():
    """Texts that begin alike share their past in the cache."""
    sampling.read.cache_clear()
    alone = [last(seed=seed, temperature=0.3).numbers["texts"] for seed in (0, 1)]
    last(temperature=0.0)
    sampling.read.cache_clear()
    last(seed=1, temperature=0.25)
    for seed in (1, 0, 1):
        np.testing.assert_array_equal(last(seed=seed, temperature=0.3).numbers["texts"], alone[seed])


def test_every_slice_goes_on():
    slices = list(sampling.work(**DEFAULTS))
    assert len(slices) == sampling.BYTES // sampling.SLICE
    for count, (done, result) in enumerate(slices, start=1):
        assert math.isclose(done, count / len(slices))
        np.testing.assert_array_equal(
            result.numbers["texts"], slices[-1][1].numbers["texts"][:, : count * sampling.SLICE]
        )


def test_longest_prompt_fits_what_the_model_was_trained_on():
    longest = sampling.CONTROLS["prompt"].longest
    assert 4 * longest + sampling.BYTES == 256
    assert last(prompt="🙂" * longest).numbers["texts"].shape == (6, 32)


def test_sentence():
    greedy = last(temperature=0.0)
    assert greedy.sentence.startswith("Temperature 0 takes the largest")
    assert "top-k 50, top-p 0.85, draw 0 are not used" in greedy.sentence and "all alike" in greedy.sentence
    assert (greedy.numbers["k_left"], greedy.numbers["p_left"]) == (1, 1) and greedy.numbers["left"][0] == 1
    result = last()
    n = result.numbers
    assert f"Top-k leaves {n['k_left']} of 256 bytes, top-p {n['p_left']} of them" in result.sentence
    assert ", 1.0 after" in greedy.sentence
    different = len({tuple(row) for row in n["texts"]})
    assert f"6 texts of 32 bytes, {different} different" in result.sentence


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0, "penalty": 2.0}])
def test_surprise_is_the_loss_of_the_texts(model, changes):
    n = last(**changes).numbers
    start = torch.tensor([list(PROMPT.encode())] * 6)
    ids = torch.cat([start, torch.from_numpy(n["texts"])], dim=1)
    labels = torch.cat([torch.full_like(start, -100), ids[:, start.shape[1] :]], dim=1)
    with torch.no_grad():
        assert math.isclose(model(ids, labels=labels).loss.item(), n["surprise"], rel_tol=1e-5)


def test_perplexity():
    assert math.isclose(sampling.perplexity(np.full(5, 0.2)), 5)
    assert math.isclose(sampling.perplexity(np.array([0, 1.0, 0])), 1)
    assert math.isclose(sampling.perplexity(np.array([0.5, 0.25, 0.25])), 2**1.5)


def test_a_line_never_shows_half_a_character():
    assert sampling.line("a 漢\n".encode()) == "a □↵"  # the picture's font has no Chinese
    assert sampling.line("é“".encode()) == "é“"
    assert [sampling.line("é“".encode()[:length]) for length in range(6)] == ["", "", "é", "é", "é", "é“"]
    assert sampling.line(b"a\xffb") == "a□b"


def test_the_picture_is_the_distribution():
    explorer = sampling.explore(top_k=5, top_p=1.0)
    scene, n = explorer.scene, explorer.result.numbers
    assert [bar.get_height() for bar in scene["bars"]] == list(n["left"])
    assert [bar.get_visible() for bar in scene["bars"]] == [True] * 5 + [False] * 20
    assert scene["kept"].get_x() + scene["kept"].get_width() == 5.5
    assert list(scene["cut"].get_data()[0]) == [5.5, 5.5]
    np.testing.assert_array_equal(scene["own"].get_data()[1], n["own"])
    np.testing.assert_array_equal(scene["mass"].get_data()[1], n["mass"])
    assert [text.get_text() for text in scene["symbols"]] == [sampling.symbol(int(byte)) for byte in n["bytes"]]
    assert scene["texts"][0].get_text() == sampling.line(bytes(n["texts"][0].tolist()))
    explorer.set(top_k=50, top_p=0.85)
    assert list(scene["cut"].get_data()[0]) == []  # beyond the picture
    kept = explorer.result.numbers["p_left"]
    mass = explorer.result.numbers["mass"]
    assert mass[kept - 1] >= 0.85 > mass[kept - 2]  # the yellow ground ends where the mass crosses the line
    assert scene["kept"].get_x() + scene["kept"].get_width() == pytest.approx(kept + 0.5)
    explorer.choose("greedy")
    assert len(scene["mass"].get_data()[0]) == len(scene["p"].get_data()[0]) == 0
    assert [sampling.symbol(byte) for byte in (32, 10, 65, 0xE2, 0)] == ["␣", "↵", "A", "e2", "00"]


def test_presets():
    assert sampling.PRESETS["MiniMind"] == MINIMIND
    assert all(preset.keys() == MINIMIND.keys() for preset in sampling.PRESETS.values())
    left = {name: last(**values).numbers["p_left"] for name, values in sampling.PRESETS.items()}
    assert left["greedy"] == 1 <= left["cautious"] <= left["MiniMind"] < left["wild"] == 256
