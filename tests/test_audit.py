"""The audit finds no fault in the notebooks, and finds each fault that is planted in a good one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import audit
import nbformat
import pytest
from audit import Notebook

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_fault(path):
    faults = audit.audit(path)
    assert not faults, "\n" + "\n".join(faults)


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_nothing_asks_for_lax_comparison(tmp_path):
    assert audit.audit_runners(ROOT) == []
    (tmp_path / ".github" / "workflows").mkdir(parents=True)
    (tmp_path / ".github" / "workflows" / "test.yml").write_text("run: pytest --nbval-" + "lax notebooks\n")
    assert len(audit.audit_runners(tmp_path)) == 1


# ---------------------------------------------------------------- a good notebook

WIDGET = {"application/vnd.jupyter.widget-view+json": {"model_id": "0"}}
TITLE = """# 01 Averages

This notebook shows what an average hides.

**After this notebook you can**

- compute one
- doubt one
- draw one

**Time:** 20 minutes

**Before you start:** addition.

**Know this already?** Do exercise 2 and go on.
"""
CARD = """### Exercise {number}: the mean

**Difficulty:** easy. **Minutes:** 5

Plan: `x [batch, seq]` goes in, `[batch]` comes out.
"""
FOLDED = """<details><summary>Hint</summary>Add first.</details>
<details><summary>Outline</summary>Sum, then divide.</details>
<details><summary>Solution</summary>

```python
def mean(x):
    return sum(x) / len(x)
```

</details>
"""


def _text(source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(source)


def _code(source: str, printed: str = "", data: dict | None = None) -> nbformat.NotebookNode:
    outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed)] if printed else []
    outputs += [nbformat.v4.new_output("display_data", data=data)] if data else []
    return nbformat.v4.new_code_cell(source, outputs=outputs)


def _exercise(number: int) -> list[nbformat.NotebookNode]:
    stub = _code("def mean(x):\n    ...")
    check = _code("exercises.check('01_averages.mean', mean)", "not attempted yet")
    return [_text(CARD.format(number=number)), stub, check, _text(FOLDED)]


def _good(folder: Path, stem: str = "01_averages") -> Notebook:
    (folder / "figures").mkdir(exist_ok=True)
    (folder / "figures" / "mean.png").write_bytes(b"")
    (folder / "notebooks").mkdir(exist_ok=True)
    (folder / "notebooks" / "02_next.ipynb").write_text("{}")
    picture = "![A curve of the mean that falls as the numbers grow](../figures/mean.png)"
    cells = [
        _text(TITLE),
        _code("from minimind_core import agree"),
        _text("## Predict: which is larger?\n\nIs the mean of 1 and 3 larger than 2?\n\n" + "A word of prose. " * 100),
        _text("## The equation\n\n$$ m = s / n $$\n\n**Source:** Someone 2019, equation 4\n\n## As loops"),
        _code("for x in (1, 3):\n    print(x)", "1\n3"),
        _text("## In einops\n\n**Shapes:** `[batch, seq] -> [batch]`"),
        _code("mean = reduce(x, 'batch seq -> batch', 'mean')\nprint(mean.shape)", "torch.Size([2])"),
        _text("## They agree"),
        _code("agree(loops=a, einops=b)", "loops = einops  close: True  (1e-6)"),
        _text(f"## Explore\n\n{picture}"),
        _code("explorer", data={**WIDGET, "text/plain": "<Explorer mean: the mean is 2.00>"}),
        _text("## In MiniMind"),
        _code("print(trace(model))", "norm [4, 340, 768]"),
        _text("## Myths, measured\n\n### Myth: the mean is always a number of the list"),
        _code("print(2 in (1, 3))", "False"),
        _text("## Exercises"),
        *_exercise(1),
        *_exercise(2),
        *_exercise(3),
        _text("## Recap\n\n" + "- a line\n" * 5),
        _text("## Three questions\n\nWhat is 1? What is 2? What is 3?"),
        _code("print(1)", "1"),
        _code("print(2)", "2"),
        _code("print(3)", "3"),
        _text("## Next\n\n[Go on](02_next.ipynb)"),
        _text("## For teachers\n\nA lesson of 45 minutes. Ask: why 2? The common wrong answer is 3."),
    ]
    notebook = Notebook(folder / "notebooks" / f"{stem}.ipynb", cells)
    for count, cell in enumerate(notebook.code, start=1):
        cell.execution_count = count
    return notebook


def _faults(notebook: Notebook) -> dict[str, list[str]]:
    fresh = Notebook(notebook.path, notebook.cells)  # the helpers remember what they read
    return {gate.__name__: list(gate(fresh)) for gate in audit.GATES}


def test_a_good_notebook_passes(tmp_path):
    assert {gate: faults for gate, faults in _faults(_good(tmp_path)).items() if faults} == {}


# ---------------------------------------------------------------- one fault at a time


def _replace(old: str, new: str) -> Callable[[Notebook], None]:
    def plant(notebook: Notebook) -> None:
        cells = [cell for cell in notebook.cells if old in cell.source]
        assert cells, f"{old!r} is in no cell"
        for cell in cells:
            cell.source = cell.source.replace(old, new)

    return plant


def _print(source: str, text: str) -> Callable[[Notebook], None]:
    """Let the cell that contains `source` print `text`."""

    def plant(notebook: Notebook) -> None:
        cell = next(cell for cell in notebook.code if source in cell.source)
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]

    return plant


def _output(kind: str, **fields) -> Callable[[Notebook], None]:
    def plant(notebook: Notebook) -> None:
        notebook.code[2].outputs.append(nbformat.v4.new_output(kind, **fields))

    return plant


def _tag(tag: str) -> Callable[[Notebook], None]:
    return lambda notebook: notebook.code[2].metadata.update(tags=[tag])


def _clear(notebook: Notebook) -> None:
    notebook.code[3].execution_count = None


def _without_widget(notebook: Notebook) -> None:
    next(cell for cell in notebook.code if cell.source == "explorer").outputs = []


def _picture_below(notebook: Notebook) -> None:
    index = next(index for index, cell in enumerate(notebook.cells) if cell.source.startswith("## Explore"))
    image = notebook.cells[index].source.split("\n\n")[1]
    notebook.cells[index].source = "## Explore"
    notebook.cells.insert(index + 2, _text(image))


def _swap_sections(notebook: Notebook) -> None:
    recap = next(index for index, cell in enumerate(notebook.cells) if cell.source.startswith("## Recap"))
    notebook.cells.append(notebook.cells.pop(recap))


def _drop_exercise(notebook: Notebook) -> None:
    start = next(index for index, cell in enumerate(notebook.cells) if cell.source.startswith("### Exercise 3"))
    del notebook.cells[start : start + 4]


def _join_stub_and_check(notebook: Notebook) -> None:
    stub = next(cell for cell in notebook.code if cell.source.startswith("def mean"))
    stub.source += "\ncheck(mean)"


def _bare_figure(notebook: Notebook) -> None:
    data = {"image/png": "", "text/plain": "<Figure size 640x480 with 1 Axes>"}
    stub = next(cell for cell in notebook.code if cell.source.startswith("def mean"))
    stub.outputs = [nbformat.v4.new_output("display_data", data=data)]


ERROR = {"ename": "ValueError", "evalue": "7", "traceback": []}
IGNORE = "# NBVAL_IGNORE_OUTPUT\n"
REASON = "# the time differs from run to run\n"

FAULTS: list[tuple[str, str, Callable[[Notebook], None]]] = [
    ("counts_run_from_one", "a cleared cell", _clear),
    ("counts_run_from_one", "an empty cell", _replace("print(2 in (1, 3))", "\n")),
    ("no_stderr", "a warning", _output("stream", name="stderr", text="UserWarning")),
    ("errors_are_meant", "an error without a tag", _output("error", **ERROR)),
    ("errors_are_meant", "a stale tag", _tag("raises-exception")),
    ("errors_are_meant", "a stale comment", _replace("print(1)", "# NBVAL_RAISES_EXCEPTION\nprint(1)")),
    ("ignored_cells_say_why", "no reason", _replace("print(1)", IGNORE + "print(1)")),
    ("ignored_cells_say_why", "a short reason", _replace("print(1)", IGNORE + "# time\nprint(1)")),
    ("ignored_cells_say_why", "three of them", _replace("print(", IGNORE + REASON + "print(")),
    ("ignored_cells_say_why", "a skipped cell", _replace("print(1)", "# NBVAL_SKIP\nprint(1)")),
    ("ignored_cells_say_why", "a hidden tag", _tag("nbval-ignore-output")),
    ("ignored_cells_say_why", "a marker in a line", _replace("print(1)", "print(1)  # NBVAL_IGNORE_OUTPUT")),
    ("pictures_have_numbers", "a bare figure", _bare_figure),
    ("images_have_alt_text", "a short alt text", _replace("A curve of the mean that falls as the", "A curve of")),
    ("images_have_alt_text", "a lost file", _replace("mean.png", "median.png")),
    ("images_have_alt_text", "a remote file", _replace("../figures/mean.png", "https://example.org/mean.png")),
    ("images_have_alt_text", "an img without alt", _replace("## Recap", '<img src="../figures/mean.png">\n\n## Recap')),
    ("links_lead_somewhere", "a dead link", _replace("02_next.ipynb", "03_lost.ipynb#part")),
    ("nothing_captures_output", "interact", _replace("print(1)", "interact(print, x=1)")),
    ("nothing_captures_output", "Output", _replace("print(1)", "%time\nwith widgets.Output():\n    print(1)")),
    ("nothing_captures_output", "clear_output", _replace("print(1)", "from IPython.display import clear_output")),
    ("outputs_name_no_machine", "cpu", _print("print(1)", "on cpu")),
    ("outputs_name_no_machine", "cuda", _print("print(1)", "tensor(1, device='cuda:0')")),
    ("outputs_name_no_machine", "an address", _print("print(1)", "<object at 0x7f5d2c0b1e40>")),
    ("outputs_name_no_machine", "a path", _print("print(1)", "saved in /home/ada/model.pt")),
    ("outputs_name_no_machine", "a Windows path", _print("print(1)", "saved in C:\\Users\\ada")),
    ("outputs_name_no_machine", "a progress bar", _print("print(1)", "50%|#####     | 5/10")),
    ("cells_are_short", "a long cell", _replace("print(1)", "print(1)\n" * (audit.CELL_LINES + 1))),
    ("prose_is_measured", "too little", _replace("A word of prose. ", "")),
    ("prose_is_measured", "too much", _replace("A word of prose. ", "A word of prose. " * 8)),
    (
        "prose_is_measured",
        "much below a table",
        _replace("A word of prose. ", "\n\n| a |\n\n" + "A word of prose. " * 8),
    ),
    ("title_cell", "another number", _replace("# 01 Averages", "# 02 Averages")),
    ("title_cell", "no purpose", _replace("This notebook shows what an average hides.\n\n", "")),
    ("title_cell", "two aims", _replace("- draw one\n", "")),
    ("title_cell", "no minutes", _replace("20 minutes", "short")),
    ("title_cell", "no prerequisites", _replace("**Before you start:** addition.", "")),
    ("title_cell", "no way past", _replace("**Know this already?**", "Know it?")),
    ("setup_cell", "a long set-up", _replace("from minimind_core import agree", "import math\n" * 6)),
    ("setup_cell", "no imports", _replace("from minimind_core import agree", "x = 1")),
    ("setup_cell", "output", _print("from minimind_core", "ready")),
    *[("sections_in_order", f"no {name}", _replace(f"## {name}", "## Something")) for name in audit.SECTIONS],
    ("sections_in_order", "the recap last", _swap_sections),
    ("predict", "no question", _replace("larger than 2?", "larger than 2.")),
    ("equation", "no formula", _replace("$$", "")),
    ("equation", "no source", _replace("**Source:**", "See")),
    ("loops", "no loop", _replace("for x in (1, 3):\n    print(x)", "print(1, 3)")),
    ("loops", "no output", _print("for x in", "")),
    ("einops", "no einops", _replace("reduce(", "mean_of(")),
    ("einops", "no shapes", _replace("**Shapes:**", "Look:")),
    ("agreement", "no agree", _replace("agree(loops", "print(loops")),
    ("agreement", "a false pair", _print("agree(loops", "a  close: True\nb  close: False")),
    ("agreement", "no output", _print("agree(loops", "")),
    ("agreement", "on ones", _replace("agree(loops=a", "agree(loops=ones(3)")),
    ("explorer", "no widget", _without_widget),
    ("explorer", "no picture", _replace("![A curve", "[A curve")),
    ("explorer", "the picture below", _picture_below),
    ("in_minimind", "no output", _print("print(trace(", "")),
    ("myths_are_measured", "no myth", _replace("### Myth:", "### Rumor:")),
    ("myths_are_measured", "not measured", _print("print(2 in", "")),
    ("exercises_are_cards", "two cards", _drop_exercise),
    ("exercises_are_cards", "no difficulty", _replace("**Difficulty:**", "It is")),
    ("exercises_are_cards", "no minutes", _replace("**Minutes:** 5", "")),
    ("exercises_are_cards", "no stub", _replace("def mean(x):\n    ...", "mean = None")),
    ("exercises_are_cards", "no check", _replace("exercises.check(", "exercises.show(")),
    ("exercises_are_cards", "stub and check in one", _join_stub_and_check),
    ("exercises_are_cards", "no outline", _replace("<details><summary>Outline", "<details><summary>Hint")),
    ("exercises_are_cards", "a solution in words", _replace("```python", "```")),
    ("recap", "six lines", _replace("- a line\n" * 5, "- a line\n" * 6)),
    ("questions", "two answers", _print("print(3)", "")),
    ("questions", "two questions", _replace("What is 3?", "")),
    ("next", "no link", _replace("[Go on](02_next.ipynb)", "Go on.")),
    ("teachers", "no minutes", _replace("45 minutes", "one hour")),
    ("teachers", "no question", _replace("why 2?", "why 2.")),
    ("teachers", "no wrong answer", _replace("wrong answer", "reply")),
]


@pytest.mark.parametrize("gate, what, plant", FAULTS, ids=[f"{gate}-{what}" for gate, what, _ in FAULTS])
def test_a_planted_fault_is_found(tmp_path, gate, what, plant):
    notebook = _good(tmp_path)
    plant(notebook)
    assert _faults(notebook)[gate], f"{what} was let pass"


def test_every_gate_has_a_planted_fault():
    assert {gate for gate, _, _ in FAULTS} == {gate.__name__ for gate in audit.GATES}


def test_stored_widget_state_is_a_fault(tmp_path):
    notebook = _good(tmp_path)
    book = nbformat.v4.new_notebook(cells=notebook.cells, metadata={"widgets": {}})
    nbformat.write(book, notebook.path)
    assert any("metadata.widgets" in fault for fault in audit.audit(notebook.path))


def test_the_start_may_skip_what_teaches_a_part(tmp_path):
    notebook = _good(tmp_path, audit.START)
    notebook.cells[0].source = notebook.cells[0].source.replace("# 01", "# 00")
    for name in audit.START_SKIPS:
        _replace(f"## {name}", "## Something")(notebook)
    missing = _faults(notebook)["sections_in_order"]
    assert len(missing) == 2 and all(re.search("Your progress|Glossary", fault) for fault in missing)
    notebook.cells.append(_text("## Your progress\n\n## Glossary"))
    assert not any(_faults(notebook).values())


def test_an_allowed_ignored_cell_and_a_meant_error_pass(tmp_path):
    notebook = _good(tmp_path)
    _replace("print(2)", IGNORE + REASON + "print(2)")(notebook)
    _output("error", **ERROR)(notebook)
    _tag("raises-exception")(notebook)
    assert not any(_faults(notebook).values())
