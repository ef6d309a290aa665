"""What the budget explorer says must be true: its formulas against models, and against what a pass really costs."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from minimind_core import MiniMindConfig, MiniMindForCausalLM, count_parameters
from minimind_core.explorers import budget

KEYS = ("design", "layers", "hidden", "heads", "kv_heads", "vocab", "experts", "k")
GRID = list(
    itertools.product(
        budget.DESIGNS, (1, 3), (64, 640, 2048), (1, 8, 32), (1, 2, 32), (256, 6400), (1, 2, 6), (1, 2, 8)
    )
)
STATES = random.Random(0).sample(GRID, 60)


def on_meta(config: MiniMindConfig) -> MiniMindForCausalLM:
    with torch.device("meta"):
        return MiniMindForCausalLM(config.replace(max_position_embeddings=1))


def part_of(name: str) -> str:
    if "embed_tokens" in name or name == "lm_head.weight":
        return "embedding, head"
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return "router, norms"
    return "attention" if "self_attn" in name else "feed-forward"


@pytest.mark.parametrize("state", STATES, ids=str)
def test_parameters_are_those_of_the_model(state):
    config = budget.config_of(*state)
    model, rows = on_meta(config), budget.budget(config, 1)
    counted = dict.fromkeys(budget.PARTS, 0)
    for name, parameter in model.named_parameters():
        counted[part_of(name)] += parameter.numel()
    assert rows["parameters"] == counted
    total, active = count_parameters(model)
    assert sum(rows["parameters"].values()) == total and sum(rows["for one token"].values()) == active
    result = budget.compute(**dict(zip(KEYS, state, strict=True)), length=1, dtype="bfloat16")
    np.testing.assert_array_equal(result.numbers["sums"][:2], [total, active])
    assert result.numbers["weights"] == 2 * total and result.sentence.startswith(f"{total:,} parameters")


@pytest.mark.parametrize("design", budget.DESIGNS)
@pytest.mark.parametrize("experts, k, kv_heads, length", [(1, 1, 1, 2), (1, 1, 4, 9), (3, 1, 2, 5), (6, 4, 1, 7)])
def test_flops_and_cache_of_a_real_pass(design, experts, k, kv_heads, length):
    """PyTorch's own counter watches the last of `length` tokens go through a model."""
    config = budget.config_of(design, 2, 64, 4, kv_heads, 256, experts, k)
    config = config.replace(flash_attn=False, max_position_embeddings=16)
    model = MiniMindForCausalLM(config).eval()
    ids = torch.arange(length)[None]
    past = model(ids[:, :-1], use_cache=True).past_key_values
    with FlopCounterMode(display=False) as counter:  # with gradients: the core's shortcut for a few tokens doubles rows
        output = model(ids[:, -1:], past_key_values=past, use_cache=True)
    values = dict(zip(KEYS, (design, 2, 64, 4, kv_heads, 256, experts, k), strict=True))
    numbers = budget.compute(**values, length=length, dtype="float32").numbers
    assert numbers["sums"][2] == counter.get_total_flops()
    kept = sum(tensor.nbytes for layer in output.past_key_values for tensor in layer)
    assert numbers["each"] * length == kept


@pytest.mark.parametrize("preset", [name for name in budget.PRESETS if name.startswith("MiniMind")])
def test_presets_are_the_configs(preset):
    known = getattr(MiniMindConfig, preset.lower().replace("-", "_").replace(" ", "_"))()
    own = budget.config_of(**budget.PRESETS[preset])
    unused = ("num_experts", "num_experts_per_tok") if not known.use_moe else ()
    assert {**own.to_dict(), **dict.fromkeys(unused)} == {**known.to_dict(), **dict.fromkeys(unused)}


def test_known_totals():
    """As published, and as transformers counts these two from their config.json."""
    totals = {"MiniMind-3": 63_912_192, "MiniMind-3 MoE": 198_416_640}
    totals |= {"Qwen3-0.6B": 596_049_920, "Llama-3.2-1B": 1_235_814_400}
    for preset, total in totals.items():
        assert sum(budget.budget(budget.config_of(**budget.PRESETS[preset]), 1)["parameters"].values()) == total
    assert budget.explore(experts=4).result.numbers["sums"][1] == 63_936_768


def test_what_cannot_be_is_said():
    explorer = budget.explore(heads=4, kv_heads=16, experts=2, k=5)
    assert "K/V heads: 4 used, not 16: no more than heads." in explorer.sentence
    assert "k: 2 used, not 5: no more than experts." in explorer.sentence
    assert explorer.result.numbers["each"] == 2 * 8 * 768 * 4
    explorer.set(kv_heads=4, k=2)
    assert "no more than" not in explorer.sentence


def test_the_picture_shows_the_numbers():
    explorer = budget.explore()
    for values in ({}, budget.PRESETS["MiniMind-3 MoE"], budget.PRESETS["Llama-3.2-1B"], {"length": 131072}):
        explorer.set(**values)
        scene, n = explorer.scene, explorer.result.numbers
        lengths = np.array([[bar[0].get_width() for bar in row] for row in scene["bars"]])
        np.testing.assert_allclose(lengths[0], n["parts"][0] / n["sums"][0])
        np.testing.assert_allclose(lengths[1].sum(), n["sums"][1] / n["sums"][0])
        np.testing.assert_allclose(lengths[2], n["parts"][2] / n["sums"][2])
        lefts = [[bar[0].get_x() for bar in row] for row in scene["bars"]]
        np.testing.assert_allclose(lefts, np.cumsum(lengths, axis=1) - lengths, atol=1e-12)
        assert [text.get_text() for text in scene["sums"]] == [budget.short(value) for value in n["sums"]]
        assert scene["here"].get_data()[1] == [n["each"] * n["length"]]
        assert list(scene["cache"].get_ydata()) == [n["each"], n["each"] * 2**17]
        assert set(scene["weights"].get_ydata()) == {n["weights"]}


@pytest.mark.parametrize(
    "count, words",
    [(1, "1"), (999, "999"), (999.9, "1k"), (63_912_192, "63.9M"), (999_950, "1M"), (1_235_814_400, "1.24B")],
)
def test_short(count, words):
    assert budget.short(count) == words


def test_size():
    assert [budget.size(count) for count in (8, 24_576, 255_648_768, 1.87e12)] == [
        "8 bytes",
        "24.6 kB",
        "256 MB",
        "1.87 TB",
    ]
