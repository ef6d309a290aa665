"""What the schedule explorer says must be true: its rates against the core, MiniMind's formula and plain sums."""

import math

import numpy as np
import pytest

from minimind_core.explorers import schedule
from minimind_core.training import cosine_learning_rate

DEFAULTS = {name: control.default for name, control in schedule.CONTROLS.items()}


def numbers(**changes) -> dict:
    return schedule.compute(**DEFAULTS | changes).numbers


@pytest.mark.parametrize("warm_up", [0, 5, 200])
@pytest.mark.parametrize("steps", [250, 500, 750])
def test_counted_in_updates_it_is_the_core(steps, warm_up):
    every = numbers(steps=steps, warm_up=warm_up)["shares"]
    wanted = [cosine_learning_rate(u, steps, 1.0, warm_up) for u in range(schedule.MOST)]
    np.testing.assert_allclose(every, wanted, rtol=1e-12)
    assert every[warm_up] == pytest.approx(1) and every[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("accumulation", [1, 4, 16])
def test_counted_in_micro_batches_it_is_minimind(accumulation):
    """base * (0.1 + 0.45 * (1 + cos(pi t / T))), t from 1 in micro-batches; an update takes its last micro-batch's."""
    every = numbers(counts=schedule.MICRO, after=schedule.BARE, accumulation=accumulation, steps=500)["shares"]
    total = 500 * accumulation
    for update in (0, 1, 249, 499, 749, 999):
        t = (update + 1) * accumulation
        assert every[update] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * t / total)))


def test_after_the_end():
    bare, stays = numbers(after=schedule.BARE)["shares"], numbers(after=schedule.STAYS)["shares"]
    np.testing.assert_array_equal(bare[:501], stays[:501])
    assert bare[750] == pytest.approx(0.55) and bare[999] == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(stays[500:], 0.1)


def test_a_warm_up_bends_only_the_way_to_the_end():
    """The bare formula with a warm-up climbs back from the planned end on, and as steeply as it fell."""
    bare = numbers(after=schedule.BARE, warm_up=100, steps=400)["shares"]
    np.testing.assert_allclose(bare[400:700], bare[400:100:-1], rtol=1e-9)


@pytest.mark.parametrize("accumulation", [1, 2, 4, 5])
def test_counted_wrongly_it_goes_round(accumulation):
    """t in micro-batches over T in updates: within T updates, `accumulation` half waves."""
    every = numbers(counts=schedule.MIXED, after=schedule.BARE, accumulation=accumulation, steps=500)["shares"]
    turns = np.count_nonzero(np.diff(np.sign(np.diff(every[:500]))))
    assert turns == accumulation - 1
    clamped = numbers(counts=schedule.MIXED, accumulation=accumulation, steps=500)["shares"]
    assert clamped[math.ceil(500 / accumulation) :] == pytest.approx(0.1)


@pytest.mark.parametrize("done, warm_up", [(10, 0), (100, 200), (500, 50), (1000, 50)])
def test_sums_are_the_area(done, warm_up):
    n = numbers(done=done, warm_up=warm_up)
    assert sum(n["sums"]) == pytest.approx(n["shares"][:done].sum())
    assert n["sums"][0] == pytest.approx(n["shares"][: min(warm_up, done)].sum())
    assert n["sums"][2] == pytest.approx(n["shares"][500:done].sum() if done > 500 else 0)


def test_sums_by_hand():
    """Without warm-up half of a cosine's area is its mean, 0.55; a warm-up is a triangle."""
    n = numbers(done=500, warm_up=0)
    assert n["sums"] == pytest.approx([0, 0.55 * 500 + 0.45, 0])  # the first update counts whole, the last not at all
    n = numbers(done=500, warm_up=100)
    assert n["sums"][0] == pytest.approx(100 * 101 / 2 / 101)


def test_sentence():
    text = schedule.compute(**DEFAULTS | {"update": 251, "base": 0.01, "done": 500, "accumulation": 8}).sentence
    assert "Update 251, before the end, has rate 0.0055: 55.0% of the base" in text
    assert "500 updates (4000 micro-batches) weigh as much as 275 at the full base rate, a sum of 2.75." in text
    text = schedule.compute(**DEFAULTS | schedule.PRESETS["climbs back"]).sentence
    assert "Update 1000, after the end" in text and "50% of it comes after the planned end" in text
    assert "in the warm-up" in schedule.compute(**DEFAULTS | {"warm_up": 50, "update": 50}).sentence


def test_the_picture_is_the_numbers():
    explorer = schedule.explore(done=700, warm_up=100, update=650, base=0.02)
    scene, n = explorer.scene, explorer.result.numbers
    x, y = scene["rate"].get_data()
    assert len(x) == 700 and x[0] == 0.5
    np.testing.assert_array_equal(y, n["shares"][:700])
    assert len(scene["plan"].get_xdata()) == schedule.MOST
    assert scene["point"].get_data()[0] == [649.5] and scene["value"].get_text() == "0.002"
    assert [bar[0].get_width() for bar in scene["bars"]] == n["sums"]
    assert list(scene["end"].get_xdata()) == [500, 500]
