"""Each repair of nbval at work, in a real run over small notebooks, beside the same run without the repairs."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest
import run_notebooks
from nbval_repairs import same_text

TESTS = Path(__file__).parent
CELL_TIMEOUT = 6  # seconds: what a dead kernel costs without the repair

# name: (source, stored output) of a cell; None for no output. All but the first and the last share one notebook.
CELLS: dict[str, tuple[str, str | None]] = {
    "dead": ("import os; os._exit(1)", None),
    "semicolon": ("6 * 7;", None),
    "semicolon_gone": ("6 * 7", None),
    "last_digit": ("print('loss 8.923, 12 heads')", "loss 8.924, 12 heads\n"),
    "second_digit": ("print('loss 8.923, 12 heads')", "loss 8.823, 12 heads\n"),
    "integer": ("print('loss 8.923, 12 heads')", "loss 8.923, 13 heads\n"),
    "claim": ("print('close: True')", "close: False\n"),
    "device": ("print('tensor(1, device=\\'cuda:0\\') on cuda:0')", "tensor(1, device='cpu') on cpu\n"),
    "address": ("print(object())", "<object object at 0x7f5d2c0b1e40>\n"),
    "process": ("print('/tmp/ipykernel_77/123.py:1: warning')", "/tmp/ipykernel_4242/981.py:1: warning\n"),
    "other_word": ("print('tensor(1, device=\\'cuda:0\\')')", "tensor(1, dtype=int)\n"),
    "progress": ("import os; print(os.environ.get('MINIMIND_PROGRESS'))", "off\n"),
    "greedy": ("print('done')", "done\n"),
}
NOTEBOOKS = {"dead": ["dead"], "text": list(CELLS)[1:-1], "greedy": ["greedy"]}
BUDGET = "import run_notebooks; run_notebooks.MEMORY_MB['greedy'] = 1.0\n"
REPAIR = f"import sys; sys.path.insert(0, {str(TESTS)!r})\nfrom nbval_repairs import repair; repair()\n{BUDGET}"


def _run(folder: Path, conftest: str) -> dict[str, tuple[str, float]]:
    """Run nbval over the cells: for each name its message ("" if it passed) and its seconds."""
    (folder / "conftest.py").write_text(conftest)
    for notebook, names in NOTEBOOKS.items():
        cells = []
        for count, (source, text) in enumerate((CELLS[name] for name in names), start=1):
            outputs = [] if text is None else [nbformat.v4.new_output("stream", name="stdout", text=text)]
            cells.append(nbformat.v4.new_code_cell(source, execution_count=count, outputs=outputs))
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{notebook}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env", "-q", "-p", "no:cacheprovider"]
    command += [f"--nbval-cell-timeout={CELL_TIMEOUT}", f"--rootdir={folder}", "-c", "/dev/null", "--junitxml=out.xml"]
    done = subprocess.run([*command, "."], cwd=folder, env=_environment(), capture_output=True, text=True, timeout=300)
    assert (folder / "out.xml").exists(), done.stdout + done.stderr
    results = {}
    for case in ElementTree.parse(folder / "out.xml").iter("testcase"):
        notebook = next(name for name in NOTEBOOKS if name in case.get("classname"))
        name = NOTEBOOKS[notebook][int(case.get("name").removeprefix("Cell "))]
        faults = [f"{child.get('message')}\n{child.text}" for child in case if child.tag in ("failure", "error")]
        results[name] = (results.get(name, ("", 0))[0] + "\n".join(faults), float(case.get("time")))
    assert set(results) == set(CELLS), done.stdout
    return results


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MINIMIND_", "PYTEST_"))}
    return {**kept, "MINIMIND_DEVICE": "cpu"}


@pytest.fixture(scope="module")
def repaired(tmp_path_factory) -> dict[str, tuple[str, float]]:
    return _run(tmp_path_factory.mktemp("repaired"), REPAIR)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, tuple[str, float]]:
    return _run(tmp_path_factory.mktemp("plain"), "")


def test_dead_kernel_is_noticed_at_once(repaired, plain):
    message, seconds = repaired["dead"]
    assert "The kernel died while it ran this cell" in message
    assert seconds < CELL_TIMEOUT / 2
    assert plain["dead"][1] > CELL_TIMEOUT - 1, "nbval itself notices now: the repair can go"


def test_semicolon_hides_the_value(repaired, plain):
    assert repaired["semicolon"][0] == ""
    assert "Unexpected output fields" in repaired["semicolon_gone"][0]
    assert plain["semicolon"][0], "nbval itself hides it now: the repair can go"


def test_only_rounding_is_tolerated(repaired, plain):
    assert repaired["last_digit"][0] == ""
    for name in ("second_digit", "integer", "claim"):
        assert "Cell outputs differ" in repaired[name][0], name
    assert plain["last_digit"][0]


@pytest.mark.parametrize("name", ["device", "address", "process"])
def test_what_differs_between_machines_does_not_count(repaired, plain, name):
    assert repaired[name][0] == ""
    assert plain[name][0]
    assert "Cell outputs differ" in repaired["other_word"][0]


def test_progress_is_off(repaired, plain):
    assert repaired["progress"][0] == ""
    assert plain["progress"][0]


def test_a_notebook_over_its_budget_fails(repaired):
    assert "greedy" in repaired["greedy"][0] and "is over 1 MB" in repaired["greedy"][0]


AGREE = [
    ("1.234", "1.235"),
    ("12.3 %", "12.4 %"),
    ("-0.000", "0.000"),
    ("0.001", "-0.000"),
    ("1.2345e-07", "1.2346e-07"),
    ("tensor([1., 2.])", "tensor([1.0000, 2.0000])"),
    ("tensor([ 0.1234, -0.5000])", "tensor([0.1235, -0.5000])"),
    ("  8.92  12", "8.92 12"),
]
DIFFER = [
    ("close: True", "close: False"),
    ("12 heads", "13 heads"),
    ("63,912,192", "63,912,193"),
    ("x is 1000.", "x is 1001."),
    ("0.500", "-0.500"),
    ("0.0001", "-0.0001"),
    ("1e-06", "1e-05"),
    ("within 1e-6", "within 1e-7"),
    ("1.500", "nan"),
    ("nan", "inf"),
    ("0.12", "0.13"),
    ("0.5", "0.6"),
    ("1.234", "1.239"),
    ("1.0000e-07", "1.0000e-06"),
    ("version 2.13.0", "version 2.13.1"),
    ("1.5 2.5", "1.5"),
    ("3-0.5", "3+0.5"),
    ("a\nb", "a b"),
    ("[1.0, 2.0]", "(1.0, 2.0)"),
]


@pytest.mark.parametrize("stored, new", AGREE)
def test_texts_that_agree(stored, new):
    assert same_text(stored, new) and same_text(new, stored)


@pytest.mark.parametrize("stored, new", DIFFER)
def test_texts_that_differ(stored, new):
    assert not same_text(stored, new) and not same_text(new, stored)


def test_budget_needs_both_clocks():
    cost = run_notebooks.Cost
    assert run_notebooks.over_budget("01_rmsnorm", cost(30, 10, 500)) is None  # others used the cores
    assert "30.0 s" in run_notebooks.over_budget("01_rmsnorm", cost(30, 40, 500))
    assert "1500 MB is over 1024 MB" in run_notebooks.over_budget("01_rmsnorm", cost(5, 5, 1500))
    assert run_notebooks.over_budget("00_start_here", cost(5, 5, 1500)) is None


def _notebook(path: Path, *cells) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells), metadata={"widgets": {}, "custom": 1}), path)
    return path


def test_run_notebooks_stores_tidy_outputs(tmp_path):
    code, markdown = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell
    path = _notebook(
        tmp_path / "tidy.ipynb",
        markdown("# Title", metadata={"editable": True}),
        code("print('one')", execution_count=7, metadata={"execution": {"iopub.status.busy": "now"}}),
        code("1 / 0", metadata={"tags": ["raises-exception"]}),
        code("import os; print(os.environ['MINIMIND_PROGRESS'], os.environ['MINIMIND_DEVICE'])"),
    )
    assert run_notebooks.main([str(path)]) == 0
    first = path.read_bytes()
    notebook = nbformat.read(path, as_version=4)
    assert [cell.get("execution_count") for cell in notebook.cells] == [None, 1, 2, 3]
    assert [dict(cell.metadata) for cell in notebook.cells] == [{}, {}, {"tags": ["raises-exception"]}, {}]
    assert dict(notebook.metadata) == {"kernelspec": run_notebooks.KERNELSPEC, "language_info": {"name": "python"}}
    assert notebook.cells[2].outputs[0].ename == "ZeroDivisionError"
    assert notebook.cells[3].outputs[0].text == "off cpu\n"
    assert first.endswith(b"}\n") and not first.endswith(b"\n\n")
    notebook.cells[2].outputs[0].traceback = []
    ids = [cell.id for cell in notebook.cells]
    notebook.cells.insert(1, markdown("new"))
    run_notebooks.normalize(notebook)
    assert [cell.id for cell in notebook.cells][2:] == ids[1:]
    assert list(tmp_path.iterdir()) == [path]


def test_run_notebooks_keeps_the_file_when_a_cell_raises(tmp_path, capsys):
    path = _notebook(tmp_path / "broken.ipynb", nbformat.v4.new_code_cell("1 / 0"))
    before = path.read_bytes()
    assert run_notebooks.main([str(path)]) == 1
    assert path.read_bytes() == before
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_run_notebooks_check_stores_nothing_and_fails_over_budget(tmp_path, monkeypatch, capsys):
    path = _notebook(tmp_path / "large.ipynb", nbformat.v4.new_code_cell("print('one')"))
    before = path.read_bytes()
    monkeypatch.setitem(run_notebooks.MEMORY_MB, "large", 1.0)
    assert run_notebooks.main(["--check", str(path)]) == 1
    assert "is over 1 MB" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_run_notebooks_stops_a_cell_that_hangs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_notebooks, "CELL_TIMEOUT", 1)
    path = _notebook(tmp_path / "slow.ipynb", nbformat.v4.new_code_cell("import time; time.sleep(60)"))
    assert run_notebooks.main([str(path)]) == 1
    assert "longer than 1 s" in capsys.readouterr().err
