"""The routing explorer: what it shows is what the model's router did, and other models can be looked at."""

import re

import numpy as np
import pytest
import torch

from minimind_core import MiniMindForCausalLM, toy
from minimind_core.explorers import attention, routing


def small(kind: str = "moe", **changes) -> MiniMindForCausalLM:
    torch.manual_seed(3)
    config = toy.CONFIGS[kind].replace(num_hidden_layers=2, hidden_size=32, intermediate_size=32, **changes)
    return MiniMindForCausalLM(config)


@pytest.mark.parametrize("text", ["a list of 3", "é 漢 🙂", "x"])
@torch.no_grad()
def test_the_experts_are_those_that_ran(text):
    model, data = routing.model("moe"), list(text.encode())
    visits = {}
    for i, layer in enumerate(model.model.layers):
        for j, expert in enumerate(layer.mlp.experts):
            expert.register_forward_hook(lambda _, x, __, key=(i, j): visits.__setitem__(key, len(x[0])))
    try:
        model(torch.tensor([data]))
    finally:
        for layer in model.model.layers:
            for expert in layer.mlp.experts:
                expert._forward_hooks.clear()
    for layer in range(4):
        n = routing.compute(text, layer, 0).numbers
        counts = np.bincount(n["expert"][layer], minlength=4)
        assert counts.tolist() == [visits.get((layer, j), 0) for j in range(4)]
        assert n["table"].sum(axis=0).tolist() == counts.tolist()
        np.testing.assert_allclose(n["probability"].sum(), 1, atol=1e-6)
        assert n["probability"].argmax() == n["expert"][layer, 0]


def test_kinds():
    assert [routing.KINDS[routing.kind(byte)] for byte in b"aZ0 \n."] == [
        "letters", "letters", "digits", "spaces", "spaces", "others",
    ]  # fmt: skip
    assert {routing.kind(byte) for byte in "é漢".encode()} == {3}


@pytest.mark.parametrize("values", [routing.PRESETS["code"], routing.PRESETS["another alphabet"]])
def test_the_sentence_says_what_the_table_holds(values):
    result = routing.compute(**values)
    table = result.numbers["table"]
    for most, count, kind, expert in re.findall(r"(\d+) of (\d+) (\w+) go to expert (\d)", result.sentence):
        row = table[routing.KINDS.index(kind)]
        assert (int(most), int(count)) == (row.max(), row.sum()) and row[int(expert)] == row.max()
    busiest = table.sum(axis=0)
    assert f"with {busiest.max()} of {busiest.sum()} bytes" in result.sentence


def test_beyond_the_end_and_too_long():
    assert "(31 is beyond the end)" in routing.compute("abc", 0, 31).sentence
    assert "Only the first 32 bytes are read." in routing.compute("🙂" * 9, 0, 3).sentence


def test_the_picture_is_the_table():
    explorer = routing.explore(text="a1 b2", layer=2, position=1)
    scene, n = explorer.scene, explorer.result.numbers
    for i, marks in enumerate(scene["marks"]):
        assert len(marks.get_xdata()) == (n["expert"] == i).sum()
    assert [bar.get_width() for bar in scene["bars"]] == pytest.approx(n["probability"])
    assert [[label.get_text() or "0" for label in row] for row in scene["counts"]] == n["table"].astype(str).tolist()


@pytest.mark.parametrize("kind, view", [("moe", routing), ("dense", attention)])
def test_a_model_of_ones_own(kind, view):
    """It is shown as it is, in evaluation mode, and stays in the mode that it was in."""
    model = small(kind, dropout=0.5).train()
    explorer = view.explore(model, text="own text", position=3)
    assert explorer.presets == {} and list(explorer.controls["layer"].grid) == [0, 1]
    assert model.training
    again = view.explore(model, text="own text", position=3)
    assert again.sentence == explorer.sentence != view.explore(text="own text", layer=1, position=3).sentence
    explorer.set(layer=0)
    explorer.reset()
    assert explorer.values["text"] == view.CONTROLS["text"].default


@pytest.mark.parametrize(
    "view, kind, changes, message",
    [
        (routing, "dense", {}, "the model has no experts"),
        (routing, "moe", {"vocab_size": 100}, "vocabulary is 100; .* 256"),
        (routing, "moe", {"num_experts": 9}, "2 layers of 9 experts; the picture has room for 6 of 8"),
        (attention, "dense", {"vocab_size": 100}, "vocabulary of 100; .* 256"),
        (attention, "dense", {"num_attention_heads": 8}, "8 heads; the picture has room for 4"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(view, kind, changes, message):
    with pytest.raises(ValueError, match=message):
        view.explore(small(kind, **changes))
