"""What notebook 00 shows: the words of the series, the table of the config, the map, and the explorer's numbers."""

import dataclasses
import re
from pathlib import Path

import nbformat
import pytest
import torch
from PIL import Image

from minimind_core import MiniMindConfig, MiniMindForCausalLM, microscope, trace
from minimind_core import glossary as words
from minimind_core.explorers import model_map, start_here, style

ROOT = Path(__file__).resolve().parents[1]


def test_terms_are_in_order_and_complete():
    names = [term.term for term in words.TERMS]
    assert names == sorted(names, key=str.lower) and len(set(names)) == len(names)
    for term in words.TERMS:
        assert term.notebook in words.NOTEBOOKS and len(term.meaning.split()) >= 3, term
    assert {term.notebook for term in words.TERMS} | {"12", "14"} == set(words.NOTEBOOKS)


def test_every_axis_of_a_trace_is_explained():
    known = {axis for term in words.TERMS for axis in term.axis.split()}
    used = {axis for _, axes in microscope.AXES for axis in re.findall(r"\w+", axes)} | set(microscope.HIDDEN.split())
    assert used - {"k"} <= known


def test_notebooks_have_their_numbers():
    for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"):
        assert path.stem[:2] in words.NOTEBOOKS


def test_glossary_finds_words():
    assert len(words.glossary().rows) == len(words.TERMS)
    assert [row[0] for row in words.glossary("wavelength", "Epsilon").rows] == ["epsilon", "wavelength"]
    assert "02 RoPE" in repr(words.glossary("wavelength"))
    with pytest.raises(ValueError, match="'zebra' is not in the glossary"):
        words.glossary("stride", "zebra")


def test_table_escapes_html():
    page = words.Table(("a & b",), [("<i>",)])._repr_html_()
    assert "a &amp; b" in page and "&lt;i&gt;" in page and "<i>" not in page


def test_config_table_has_every_field_with_its_value():
    small = MiniMindConfig.minimind_2_small()
    table = words.config_table(MiniMind_3=MiniMindConfig(), small=small)
    assert table.heads == ("group", "field", "MiniMind 3", "small", "meaning")
    assert [row[1] for row in table.rows] == [field.name for field in dataclasses.fields(MiniMindConfig)]
    for _, name, _, value, meaning in table.rows:
        assert value == str(getattr(small, name)) and meaning
    assert table.rows[0][0] == "the residual stream" and table.rows[1][0] == ""


def test_field_without_comment_is_refused(monkeypatch):
    source = words.inspect.getsource(MiniMindConfig).replace("use_moe: bool = False  #", "use_moe: bool = False  ")
    monkeypatch.setattr(words.inspect, "getsource", lambda thing: source)
    with pytest.raises(ValueError, match="no comment beside use_moe"):
        words.config_table(MiniMind_3=MiniMindConfig())


def test_map_is_drawn_as_described():
    with style.applied():
        figure = style.figure(*model_map.SIZE)
        model_map.draw(figure)
        figure.canvas.draw()
        texts = figure.axes[0].texts
        boxes = [text.get_window_extent() for text in texts]
    whole = figure.bbox
    assert all(whole.x0 <= b.x0 and b.x1 <= whole.x1 and whole.y0 <= b.y0 and b.y1 <= whole.y1 for b in boxes)
    tags = {number for text in texts for number in re.findall(r"\b\d\d\b(?=[\d ]*$)", text.get_text())}
    assert tags == set(words.NOTEBOOKS) - {"00"}, "each notebook has its place on the map"
    shown = " ".join(text.get_text() for text in texts)
    assert all(
        shape in shown and shape in model_map.ALT for shape in (model_map.IDS, model_map.HIDDEN, model_map.LOGITS)
    )


def test_notebook_and_picture_carry_the_maps_description():
    stored = Image.open(ROOT / "figures" / "map.png").text
    assert stored["Description"] == model_map.ALT, "figures/map.png is out of date: run `make figures`"
    notebook = nbformat.read(ROOT / "notebooks" / "00_start_here.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert f"![{model_map.ALT}](../figures/map.png)" in text


# the explorer's stages, and where the real model computes them
PATHS = {
    "embedding": "model.embed_tokens",
    "norm": "model.layers.0.input_layernorm",
    "q": "model.layers.0.self_attn.q_rotated",
    "k, v (each)": "model.layers.0.self_attn.k_rotated",
    "attention weights": "model.layers.0.self_attn.weights",
    "+ attention": "model.layers.0.post_attention_layernorm.input",
    "norm ": "model.layers.0.post_attention_layernorm",
    "gate, up (each)": "model.layers.0.mlp.gate_proj",
    "+ feed-forward": "model.layers.0",
    "final norm": "model.norm",
    "logits": "lm_head",
}


@pytest.mark.parametrize("model", start_here.MODELS)
def test_explorer_shapes_are_those_of_the_model(model):
    config = start_here.MODELS[model].replace(num_hidden_layers=1, max_position_embeddings=8)
    rows = {row.path: row for row in trace(MiniMindForCausalLM(config), torch.arange(6).view(2, 3))}
    names = [name for name, *_ in start_here.STAGES]
    assert names == ["ids", *PATHS, "loss"]
    for stage, name in enumerate(names[1:-1], 1):
        shape = tuple(start_here.shape_of(stage, model, 2, 3).values())
        if name == "gate, up (each)" and config.use_moe:  # computed expert by expert; together they are all visits
            visits = [row.shape for path, row in rows.items() if re.search(r"experts\.\d+\.gate_proj$", path)]
            count = sum(torch.Size(one).numel() for one in visits)
            assert torch.Size(shape).numel() == count and {one[-1] for one in visits} == {shape[-1]}
        else:
            assert shape == rows[PATHS[name]].shape, name
        same = shape == (2, 3, config.hidden_size)
        assert same or stage not in start_here.SAME, name


@pytest.mark.parametrize(
    "model, total, active", [("MiniMind-3", 63_912_192, 63_912_192), ("MiniMind-3 MoE", 198_416_640, 63_936_768)]
)
def test_explorer_counts_parameters(model, total, active):
    counts = start_here.parameters(model)
    assert counts["all"] == (total, active)
    norms = 17 * 768
    for which in (0, 1):
        assert sum(counts[group][which] for group in start_here.GROUPS) + norms == (total, active)[which]
