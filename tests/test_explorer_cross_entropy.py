"""What the explorer of the loss says must be true: its numbers against the core's loss, and against loops."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from minimind_core import shifted_cross_entropy
from minimind_core.explorers import cross_entropy
from minimind_core.explorers.cross_entropy import EQUAL, KNOWS, MARK, MASKS, MODELS, NOTHING, PROMPT, REPEATS, SPACES

TEXT = "a dict is an object"
WORDS = ("a", "is", TEXT, "é 漢 🙂 and so on", "1.5: 2.5 a# Zq~ xx||!! ?")


def labels_of(ids: list[int], mask: str, mark: int) -> list[int]:
    """The ids, with -100 where the mask lies."""
    mark = min(mark, len(ids) - 1)
    hidden = {
        NOTHING: [],
        PROMPT: range(mark),
        MARK: [mark],
        SPACES: [i for i, token in enumerate(ids) if token == 32],
    }[mask]
    return [-100 if i in hidden else token for i, token in enumerate(ids)]


@pytest.mark.parametrize("text, model, mask", list(itertools.product(WORDS, MODELS, MASKS)))
@pytest.mark.parametrize("mark", [1, 9, 23])
def test_one_shift_is_the_cores_loss(text, model, mask, mark):
    n = cross_entropy.compute(text, model, mask, mark, 1).numbers
    ids = list(cross_entropy.fitting(text, cross_entropy.LONGEST).encode())
    assert n["bytes"].tolist() == ids
    says = torch.from_numpy(cross_entropy.logits(cross_entropy.fitting(text, cross_entropy.LONGEST), model))[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing to predict
        wanted = shifted_cross_entropy(says, torch.tensor([labels_of(ids, mask, mark)])).item()
    assert n["mean"] == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert n["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-6)


@pytest.mark.parametrize("model, mask, shifts", list(itertools.product(MODELS, MASKS, range(3))))
@pytest.mark.parametrize("mark", [0, 10, 23])
def test_every_shift_against_loops(model, mask, mark, shifts):
    n = cross_entropy.compute(TEXT, model, mask, mark, shifts).numbers
    ids, rows = list(TEXT.encode()), cross_entropy.logits(TEXT, model)
    labels, counted = labels_of(ids, mask, mark), []
    for i, token in enumerate(ids):
        assert n["asked"][i] == (i >= shifts)
        assert n["masked"][i] == (labels[i] == -100)
        if i < shifts:
            continue
        row = rows[i - shifts].tolist()
        loss = math.log(sum(math.exp(z) for z in row)) - row[token]
        assert n["losses"][i] == pytest.approx(loss, abs=1e-9)
        if labels[i] != -100:
            counted.append(loss)
    assert n["count"] == len(counted)
    assert n["sum"] == pytest.approx(sum(counted), abs=1e-9)
    assert n["mean"] == pytest.approx(sum(counted) / len(counted))
    where = min(mark, len(ids) - 1)
    if where >= shifts:
        assert n["logsumexp"] - n["logit"] == pytest.approx(n["losses"][where], abs=1e-9)


def test_models_that_are_made_up():
    """A sure model costs nearly nothing where it is asked what it knows, and 10 elsewhere."""
    right = math.log(1 + 255 * math.exp(-10))

    def mean(model, shifts):
        return cross_entropy.compute("abcdef", model, NOTHING, 0, shifts).numbers["mean"]

    assert [mean(KNOWS, 1), mean(REPEATS, 0)] == pytest.approx([right, right])
    assert [mean(KNOWS, 2), mean(REPEATS, 1), mean(REPEATS, 2)] == pytest.approx([10 + right] * 3)
    assert [mean(EQUAL, shifts) for shifts in range(3)] == pytest.approx([math.log(256)] * 3)
    assert cross_entropy.compute("abcdef", EQUAL, NOTHING, 0, 1).numbers["perplexity"] == pytest.approx(256)


def test_the_trained_model_has_learned_one_shift():
    means = [
        cross_entropy.compute(TEXT, cross_entropy.TRAINED, NOTHING, 0, shifts).numbers["mean"] for shifts in (0, 1, 2)
    ]
    assert means[1] < 1.5 and means[0] > 5 and means[2] > 5


def test_the_sentence():
    say = cross_entropy.compute(TEXT, KNOWS, PROMPT, 10, 1).sentence
    assert say.startswith(
        "1 shift: each position is asked for the next token. 9 of 18 labels count: loss 0.10 / 9 = 0.01,"
    )
    assert say.endswith("The mark is 'a' at 10, predicted at 9: -(10.00) + 10.01 = 0.01, p = 0.989.")
    say = cross_entropy.compute(TEXT, KNOWS, MARK, 9, 2).sentence
    assert "asked for the token after the next. 16 of 17 labels count" in say
    assert say.endswith("The mark is the space at 9, predicted at 7: -(0.00) + 10.01 = 10.01 (masked).")
    say = cross_entropy.compute("a", KNOWS, NOTHING, 5, 1).sentence
    assert "No label is left to predict: the loss is 0 and teaches nothing." in say
    assert say.endswith("The mark is 'a' at 0, predicted by no position. 5 is beyond the end.")
    say = cross_entropy.compute("漢" * 9, KNOWS, NOTHING, 1, 1).sentence
    assert say.endswith(
        "byte BC at 1, predicted at 0: -(10.00) + 10.01 = 0.01, p = 0.989. Only the first 24 bytes are read."
    )


def middles(collection) -> list[float]:
    """The middle of each box, along the page."""
    return [float(path.vertices[:4, 0].mean()) for path in collection.get_paths()]


@pytest.mark.parametrize("shifts", range(3))
def test_the_picture(shifts):
    """Arrows, bars and hatches, read back from the artists."""
    explorer = cross_entropy.explore(mask=SPACES, mark=10, shifts=shifts)
    scene, n = explorer.scene, explorer.result.numbers
    wide = (cross_entropy.RIGHT - cross_entropy.LEFT) / len(TEXT)
    place = [cross_entropy.LEFT + (i + 0.5) * wide for i in range(len(TEXT))]
    spaces = [i for i, char in enumerate(TEXT) if char == " "]
    assert middles(scene["hidden"]) == pytest.approx([place[i] for i in spaces])
    assert middles(scene["marked"]) == pytest.approx([place[10 - shifts], place[10]])
    assert middles(scene["frame"]) == pytest.approx([place[10]])

    arrows = {}
    for name in ("arrows", "idle", "mark_arrow"):
        for (start, _), (end, _) in scene[name][0].get_segments():
            arrows[round((end - place[0]) / wide)] = (name, round((start - place[0]) / wide))
    assert sorted(arrows) == list(range(shifts, len(TEXT)))
    for target, (name, source) in arrows.items():
        assert source == target - shifts
        assert name == ("mark_arrow" if target == 10 else "idle" if target in spaces else "arrows")

    heights = {}
    for name in ("bars", "hidden_bars"):
        for middle, path in zip(middles(scene[name]), scene[name].get_paths(), strict=True):
            target = round((middle - place[0]) / wide)
            assert (name == "hidden_bars") == (target in spaces)
            heights[target] = path.vertices[:, 1].max()
    assert sorted(heights) == list(range(shifts, len(TEXT)))
    for target, height in heights.items():
        assert height == pytest.approx(min(n["losses"][target], cross_entropy.HIGHEST))
    np.testing.assert_allclose(scene["mean"].get_ydata(), n["mean"])
    shown = [text.get_text() for text in scene["read"] if text.get_visible()]
    assert shown == [text.get_text() for text in scene["wanted"] if text.get_visible()]
    assert "".join(shown) == TEXT.replace(" ", "␣")


def test_nothing_to_predict_draws_no_mean():
    explorer = cross_entropy.explore(text="a")
    assert not len(explorer.scene["mean"].get_xdata()) and not explorer.scene["bars"].get_paths()
    assert not explorer.scene["arrows"][0].get_segments() and not explorer.scene["mark_arrow"][0].get_segments()
