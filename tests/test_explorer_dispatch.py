"""What the dispatch explorer draws must be true: against plain loops, against the core, and for any text at all."""

import itertools
import random

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgba
from reference import tiny_config
from torch import nn

from minimind_core import MOEFeedForward
from minimind_core.explorers import dispatch, style

TABLES = {
    "13 25 12": [(1, 3), (2, 5), (1, 2)],
    "0 0 0": [(0,), (0,), (0,)],
    "3,1,2": [(3,), (1,), (2,)],
    "(4 5) 01": [(4,), (5,), (0,)],
    "012 543 201": [(0, 1, 2), (5, 4, 3), (2, 0, 1)],
    "50 05 50 05 50 05 50 05": [(5, 0), (0, 5)] * 4,
}


def by_hand(rows: list[tuple[int, ...]], experts: int) -> dict:
    """Sort, sizes, ends, results and sums with plain lists."""
    k, shares = len(rows[0]), dispatch.SHARES[len(rows[0])]
    flat = [(expert, token, share) for token, row in enumerate(rows) for expert, share in zip(row, shares, strict=True)]
    order = sorted(range(len(flat)), key=lambda a: flat[a][0])  # Python's sort is stable
    sizes = [sum(expert == e for expert, _, _ in flat) for e in range(experts)]
    sums = [sum(share * (10 * e + t) for e, t, share in flat if t == token) for token in range(len(rows))]
    return {
        "k": k,
        "expert_idx": [expert for expert, _, _ in flat],
        "order": order,
        "token": [flat[a][1] for a in order],
        "sizes": sizes,
        "ends": list(itertools.accumulate(sizes)),
        "results": [10 * flat[a][0] + flat[a][1] for a in order],
        "weight": [share for _, _, share in flat],
        "y": sums,
    }


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("experts", [6, 8])
def test_numbers_follow_plain_lists(table, experts):
    numbers = dispatch.compute(table, experts, 1).numbers
    for key, wanted in by_hand(TABLES[table], experts).items():
        np.testing.assert_allclose(numbers[key], wanted, err_msg=key)


def test_the_example_of_the_notebook():
    numbers = dispatch.compute("13 25 12", 6, 1).numbers
    assert numbers["ends"].tolist() == [0, 2, 4, 5, 5, 6]


@pytest.mark.parametrize("table", TABLES)
def test_sums_are_those_of_the_core(table):
    """The core's own dispatch, with experts that make 10 e + t of token t."""

    class Expert(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            return 10 * self.number + x

    rows = torch.tensor(TABLES[table])
    tokens, k = rows.shape
    layer = MOEFeedForward(tiny_config(use_moe=True, num_experts=6, num_experts_per_tok=k))
    layer.experts = nn.ModuleList(map(Expert, range(6)))
    x = torch.arange(tokens, dtype=torch.float64)[:, None]
    weight = torch.tensor(dispatch.SHARES[k], dtype=torch.float64).repeat(tokens)
    wanted = layer._dispatch(x, rows.flatten(), weight)[:, 0]
    np.testing.assert_allclose(dispatch.compute(table, 6, 12).numbers["y"], wanted)


@pytest.mark.parametrize(
    "table, experts, rows, said",
    [
        ("13 25 12", 6, ((1, 3), (2, 5), (1, 2)), ""),
        ("13;25/12", 6, ((1, 3), (2, 5), (1, 2)), ""),
        ("1a3", 6, ((1,), (3,)), "only digits count"),
        ("-1 +2", 6, ((1,), (2,)), "only digits count"),
        ("11 22", 6, ((1,), (2,)), "a token visits an expert once"),
        ("13 9 12", 6, ((1, 3), (1, 2)), "experts are 0 to 5"),
        ("13 2 12", 6, ((1,), (2,), (1,)), "k is the same for all, here 1"),
        ("01234 43210", 5, ((0, 1, 2, 3), (4, 3, 2, 1)), "4 experts for a token are the most"),
        ("0 1 0 1 0 1 0 1 0 1", 4, ((0,), (1,)) * 4, "the first 8 tokens are shown"),
        ("012 012 012 012 012 012", 4, ((0, 1, 2),) * 5, "the first 5 tokens are shown"),
        ("hello", 6, ((0,), (1,)), "no expert found in the table, so 0 1 is shown"),
        ("٣ ²", 6, ((0,), (1,)), "no expert found in the table, so 0 1 is shown"),
        ("7 8", 4, ((0,), (1,)), "no expert found in the table, so 0 1 is shown"),
    ],
)
def test_a_text_that_is_no_table_is_read_as_far_as_possible(table, experts, rows, said):
    assert dispatch.parse(table, experts) == (rows, said)
    assert (f"Table: {said}." if said else "Table") in dispatch.compute(table, experts, 1).sentence or not said


def test_any_text_at_any_step():
    rng = random.Random(0)
    for _ in range(400):
        text = "".join(rng.choice("0123456789 ,x-é") for _ in range(rng.randint(1, 40)))
        for step in (1, 2, 5, 8, 14):
            experts = rng.randint(2, 8)
            result = dispatch.compute(text, experts, step)
            n = result.numbers
            assert len(result.sentence) <= 300, result.sentence
            assert 1 <= len(n["order"]) <= dispatch.MOST and n["ends"][-1] == len(n["order"])
            assert sorted(n["order"]) == list(range(len(n["order"])))


def test_each_step_adds_its_part():
    """What is drawn in a step, for the six assignments: places and colors by the expert, not before their step."""
    explorer = dispatch.explore(step=1)
    scene, wanted = explorer.scene, by_hand(TABLES["13 25 12"], 6)
    by = [wanted["expert_idx"][a] for a in wanted["order"]]
    for step in range(1, 15):
        explorer.set(step=step)
        final = step >= 12
        for i in range(6):
            color = style.color(f"expert {by[i]}") if step >= 2 else style.GRID
            assert tuple(scene["cells"]["sorted"].get_edgecolor()[i]) == to_rgba(color)
            ran = final or (step >= 6 and by[i] <= step - 6)
            share = wanted["weight"][wanted["order"][i]]
            assert scene["sorted"][i].get_text() == (f"t{wanted['token'][i]}\n{share}" if step >= 2 else "")
            text = f"{by[i]}{wanted['token'][i]}\n" + (f"×{share}" if final else "") if ran else ""
            assert scene["results"][i].get_text() == text
        assert [text.get_text() for text in scene["sums"][:3]] == (["18", "33", "16"] if final else [""] * 3)
        segments = scene["links"]["add"].get_segments()
        assert len(segments) == (6 if final else 0)
        heads, words = zip(*(text.get_text().split("\n") for text in scene["experts"][:6]), strict=True)
        assert heads == tuple(f"expert {e}" for e in range(6))
        if step == 3:
            assert words == ("0 tokens", "2 tokens", "2 tokens", "1 token", "0 tokens", "1 token")
        elif step >= 5:
            assert words == ("[0:0]", "[0:2]", "[2:4]", "[4:5]", "[5:5]", "[5:6]")
        else:
            assert words == (("end 0", "end 2", "end 4", "end 5", "end 5", "end 6") if step == 4 else ("",) * 6)


def test_lines_lead_home():
    """A result's line ends under the cell of its token's assignment."""
    explorer = dispatch.explore(step=14)
    wanted = by_hand(TABLES["13 25 12"], 6)
    for (start, end), a, token in zip(
        explorer.scene["links"]["add"].get_segments(), wanted["order"], wanted["token"], strict=True
    ):
        home = explorer.scene["cells"]["sums"].get_paths()[token].get_extents()
        assert home.x0 < end[0] < home.x1
        assert abs(end[0] - explorer.scene["routed"][a].get_position()[0]) < 1e-6
        assert start[1] < end[1]


def test_steps_beyond_the_last_show_the_last():
    last, beyond = (dispatch.compute("0 1", 2, step) for step in (8, 14))
    assert last.sentence == beyond.sentence and last.sentence.startswith("Step 8 of 8")


def test_presets_show_what_they_say():
    n = {name: dispatch.compute(step=1, **values).numbers for name, values in dispatch.PRESETS.items()}
    assert n["six assignments"]["ends"].tolist() == [0, 2, 4, 5, 5, 6]
    assert max(n["one expert takes all"]["sizes"]) == sum(n["one expert takes all"]["sizes"])
    assert (n["idle experts"]["sizes"] == 0).sum() == 6
    assert n["k = 1"]["k"] == 1 and min(n["k = 1"]["sizes"]) > 0
