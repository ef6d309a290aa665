"""What the SwiGLU explorer says must be true: its numbers against plain formulas, at corners and in the middle."""

import itertools
import math

import numpy as np
import pytest

from minimind_core import MiniMindConfig
from minimind_core.explorers import swiglu

WEIGHTS = (-2.0, 0.0, 0.75)
STATES = list(itertools.product(swiglu.FUNCTIONS, swiglu.FORMS, WEIGHTS, WEIGHTS, (-165, 45)))


def act(name: str, x: float) -> float:
    sigmoid = 1 / (1 + math.exp(-x))
    return {
        "silu": x * sigmoid,
        "gelu": x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "relu": max(x, 0.0),
        "sigmoid": sigmoid,
        "none": x,
    }[name]


def feature(name: str, form: str, gate: float, up: float) -> float:
    if form == "act(gate)":
        return act(name, gate)
    return act(name, gate) * up if form == "act(gate) * up" else gate * act(name, up)


@pytest.mark.parametrize("activation, form, gate_1, up_2, angle", STATES)
def test_numbers_follow_the_formula(activation, form, gate_1, up_2, angle):
    n = swiglu.compute(activation, form, gate_1, -0.25, 0.5, up_2, angle, 768).numbers
    for row, column in ((0, 0), (0, 95), (40, 60), (95, 7)):  # rows run along x2, from the bottom
        x1, x2 = ((index - 47.5) / 16 for index in (column, row))
        wanted = feature(activation, form, gate_1 * x1 - 0.25 * x2, 0.5 * x1 + up_2 * x2)
        assert math.isclose(n["surface"][row, column], wanted, rel_tol=1e-9, abs_tol=1e-12)
    for t, value in ((-3, n["product"][0]), (1, n["marked"][0]), (2, n["marked"][1]), (3, n["product"][-1])):
        x1, x2 = t * math.cos(math.radians(angle)), t * math.sin(math.radians(angle))
        wanted = feature(activation, form, gate_1 * x1 - 0.25 * x2, 0.5 * x1 + up_2 * x2)
        assert math.isclose(value, wanted, rel_tol=1e-9, abs_tol=1e-12)
    np.testing.assert_allclose(n["gate_part"] * n["up_part"], n["product"])


def test_the_picture_is_the_surface():
    """The image, its signs and its lines, read back from the artists."""
    explorer = swiglu.explore(gate_1=1.0, gate_2=-0.5, up_1=0.25, up_2=2.0)
    scene, n = explorer.scene, explorer.result.numbers
    np.testing.assert_array_equal(scene["surface"].get_array(), n["surface"])
    assert scene["surface"].origin == "lower" and scene["surface"].get_clim() == (-30, 30)
    plus, minus, zero = ({*zip(*artist.get_data(), strict=True)} for artist in scene["signs"])
    assert len(plus | minus | zero) == 64 and not plus & minus
    for signs, low, high in ((plus, 0.01, 99), (minus, -99, -0.01), (zero, -0.0101, 0.0101)):
        for x1, x2 in signs:
            assert low <= feature("silu", "act(gate) * up", x1 - 0.5 * x2, 0.25 * x1 + 2 * x2) <= high
    for line, weight in zip(scene["zero"], ((1.0, -0.5), (0.25, 2.0)), strict=True):
        x1, x2 = (np.array(side) for side in line.get_data())
        np.testing.assert_allclose(weight[0] * x1 + weight[1] * x2, 0, atol=1e-9)
        assert np.hypot(x1, x2).min() > 3 * math.sqrt(2)  # reaches beyond every corner
    np.testing.assert_allclose(scene["stars"][0].get_data(), np.array([[1, 2], [1, 2]]) * math.sqrt(0.5))


def test_doubling_the_input():
    """The ratio in the sentence: 2 for one branch of ReLU, 4 for a product of two, and silu's own."""
    for activation, form, words in (
        ("relu", "act(gate)", "(2.0 times)"),
        ("none", "act(gate)", "(2.0 times)"),
        ("none", "act(gate) * up", "(4.0 times)"),
        ("relu", "act(gate) * up", "(4.0 times)"),
    ):
        assert words in swiglu.compute(activation, form, 1.0, 0.5, 0.5, 1.0, 45, 768).sentence
    n = swiglu.compute("silu", "act(gate) * up", 1.0, 0.0, 1.0, 0.0, 0, 768).numbers
    assert n["marked"][1] / n["marked"][0] == pytest.approx(4 / (1 + math.exp(-2)) * (1 + math.exp(-1)), rel=1e-9)


def test_shares_of_the_square():
    sentence = swiglu.compute("relu", "act(gate) * up", 1.0, 0.0, 0.0, 1.0, 45, 768).sentence
    assert "below 0 on 25 % of the square, 0 on 50 %" in sentence
    assert "0 on 100 %" in swiglu.compute("silu", "act(gate) * up", 0.0, 0.0, 0.0, 1.0, 45, 768).sentence


@pytest.mark.parametrize("hidden", [64, 128, 512, 768, 1024, 2048])
def test_widths_are_those_of_the_configs(hidden):
    n = swiglu.compute("silu", "act(gate)", 1.0, 0.0, 0.0, 1.0, 0, hidden).numbers
    new, old = MiniMindConfig(hidden_size=hidden), MiniMindConfig.minimind_2(hidden_size=hidden)
    widths = [4 * hidden, 4 * hidden, old.intermediate_size, new.intermediate_size]
    assert n["widths"] == widths
    assert n["parameters"] == [matrices * width * hidden for matrices, width in zip((2, 3, 3, 3), widths, strict=True)]


def test_bars_are_in_units_of_the_hidden_size_squared():
    explorer = swiglu.explore(hidden=768)
    lengths = [bar[0].get_width() for bar in explorer.scene["bars"]]
    np.testing.assert_allclose(lengths, [8, 12, 8, 9.5])
    assert explorer.scene["bar_labels"][3].get_text() == "2432: 5.60M"
    assert "width 2432, 1.19 times" in explorer.sentence
    explorer.set(hidden=512)
    lengths = [bar[0].get_width() for bar in explorer.scene["bars"]]
    np.testing.assert_allclose(lengths, [8, 12, 3 * 1408 / 512, 3 * 1664 / 512])


def test_plain_hides_the_up_branch():
    explorer = swiglu.explore(form="act(gate)")
    assert not len(explorer.scene["up"].get_xdata()) and not len(explorer.scene["zero"][1].get_xdata())
    explorer.set(form="act(gate) * up")
    assert len(explorer.scene["up"].get_xdata()) and len(explorer.scene["zero"][1].get_xdata())
