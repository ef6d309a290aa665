"""What the RoPE explorer says must be true: its numbers against plain formulas, at corners and in the middle."""

import itertools
import math

import numpy as np
import pytest

from minimind_core.explorers import rope

STATES = list(itertools.product((0, 3, 255), (0, 9, 255), (0, 5), (1e2, 1e6, 1e8), (12, 96, 128)))


@pytest.mark.parametrize("position, offset, pair, base, head_dim", STATES)
def test_numbers_follow_the_formula(position, offset, pair, base, head_dim):
    n = rope.compute(position, offset, pair, base, head_dim).numbers
    thetas = base ** -(2 * np.arange(head_dim // 2) / head_dim)
    angle = position * thetas[pair]
    np.testing.assert_allclose(n["key"], (math.cos(angle), math.sin(angle)), atol=1e-4)
    assert math.isclose(n["own_score"], math.cos(offset * thetas[pair]), abs_tol=2e-4)
    assert math.isclose(n["score"], np.cos(offset * thetas).mean(), abs_tol=1e-4)
    np.testing.assert_allclose(n["table"], np.cos(np.outer(thetas, np.arange(512))), atol=2e-4)
    np.testing.assert_allclose(n["all"], np.cos(np.outer(np.arange(512), thetas)).mean(-1), atol=1e-4)


def test_scores_do_not_depend_on_the_position():
    scores = [rope.compute(position, 9, 6, 1e6, 96).numbers["score"] for position in range(0, 256, 15)]
    assert max(scores) - min(scores) < 1e-5


def test_a_pair_beyond_the_last_is_capped_and_said():
    result = rope.compute(3, 9, 63, 1e6, 8)
    assert result.numbers["pair"] == 3
    assert "63 is beyond the last one" in result.sentence
