"""The reader's progress: written by a passing check alone, whole or not at all, and never in the way."""

import linecache
import os

import pytest

from minimind_core import exercises
from minimind_core.exercises import store
from minimind_core.exercises.framework import Exercise, case

NAME = "03_yarn.attention_factor"


def passing(factor):
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0  # noqa: F821


def failing(factor):
    return factor


def helper(factor):
    return 0.1 * store.math.log(factor) + 1


def leaning(factor):
    return helper(factor) if factor > 1 else 1.0


passing.__globals__["math"] = store.math


class Halve:
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return x / 2


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """An empty project folder; the kernel runs in its notebooks folder."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (folder / "00_start_here.ipynb").touch()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MINIMIND_PROGRESS", raising=False)
    return folder


def saved(notebooks) -> list[str]:
    return sorted(path.name for path in notebooks.glob(".progress/*"))


def state() -> str:
    return {name: state for name, _, state in exercises.progress().rows}[NAME]


def test_only_a_pass_is_saved(notebooks):
    def stub(factor):
        raise NotImplementedError

    for function in (stub, failing, lambda: 1, None):
        assert not exercises.check(NAME, function).passed
    assert saved(notebooks) == [] and state() == "not yet"
    assert "Saved" in repr(exercises.check(NAME, passing))
    assert saved(notebooks) == [f"{NAME}.py"] and state() == "passed"
    exercises.check(NAME, failing)
    assert state() == "passed", "a later failure takes nothing away"


def test_own_function_is_loaded_and_said(notebooks, capsys):
    assert exercises.load(NAME) is exercises.get(NAME).reference
    assert capsys.readouterr().out == f"{NAME}: the reference; you have not passed this exercise yet.\n"
    exercises.check(NAME, passing)
    own = exercises.load(NAME)
    assert capsys.readouterr().out == f"{NAME}: your own version.\n"
    assert own.__name__ == "passing" and own is not passing and own(16) == passing(16)
    assert exercises.check(NAME, own).passed, "a loaded function has a source, so it can be checked and saved again"
    assert "Saved" in repr(exercises.check(NAME, own))


def test_found_from_the_project_folder_too(notebooks, monkeypatch):
    monkeypatch.chdir(notebooks.parent)
    exercises.check(NAME, passing)
    assert saved(notebooks) == [f"{NAME}.py"]


def test_other_names_of_the_notebook_are_told(notebooks, capsys):
    report = exercises.check(NAME, leaning)
    assert report.passed and "your function needs `helper`" in " ".join(repr(report).split())
    assert state() == "passed", "the tick is earned all the same"
    assert exercises.load(NAME) is exercises.get(NAME).reference
    assert "the reference; your function needs `helper`" in capsys.readouterr().out


def test_annotations_and_provided_names_do_not_hinder_loading(notebooks):
    name = "02_rope.half_from_interleaved"
    source = (
        "def half_from_interleaved(x: SomeType) -> Unknown:\n"
        '    return rearrange(x, "... (pairs two) -> ... (two pairs)", two=2)\n'
    )
    exercises.reset()
    (notebooks / ".progress").mkdir()
    (notebooks / ".progress" / f"{name}.py").write_text(source)
    assert exercises.load(name).__name__ == "half_from_interleaved"
    assert exercises.load(name) is not exercises.get(name).reference


def test_function_without_source_passes_unsaved(notebooks):
    namespace = {"math": store.math}
    exec("def f(factor):\n    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0", namespace)
    for function in (namespace["f"], lambda factor: passing(factor)):
        report = exercises.check(NAME, function)
        assert report.passed and "Not saved" in repr(report)
    assert saved(notebooks) == []


def test_off_neither_reads_nor_writes(notebooks, monkeypatch, capsys):
    fresh = repr(exercises.progress())
    monkeypatch.setenv("MINIMIND_PROGRESS", "off")
    assert repr(exercises.check(NAME, passing)) == f"✓ {NAME}: passed"
    assert saved(notebooks) == [] and not (notebooks / ".progress").exists()
    monkeypatch.delenv("MINIMIND_PROGRESS")
    exercises.check(NAME, passing)
    assert repr(exercises.progress()) != fresh
    monkeypatch.setenv("MINIMIND_PROGRESS", " Off")
    assert repr(exercises.progress()) == fresh, "the map looks as on the first day"
    assert exercises.load(NAME) is exercises.get(NAME).reference
    assert capsys.readouterr().out == "", "stored outputs hold no line of it"
    exercises.reset()
    assert saved(notebooks) == [f"{NAME}.py"]


def test_reset_forgets_one_or_all(notebooks, capsys):
    other = "03_yarn.pair_index"
    exercises.check(NAME, passing)
    store.save(exercises.get(other), exercises.get(other).reference)
    assert exercises.progress().passed == 2
    exercises.reset(other)
    assert capsys.readouterr().out == "Forgotten: 1 passed exercise.\n"
    assert exercises.progress().passed == 1 and state() == "passed"
    (notebooks / ".progress" / "notes.txt").write_text("the reader's own")
    exercises.reset()
    assert exercises.progress().passed == 0
    assert saved(notebooks) == ["notes.txt"], "only the files of exercises are deleted"
    with pytest.raises(ValueError, match="no exercise"):
        exercises.reset("nothing")


def test_written_whole_or_not_at_all(notebooks, monkeypatch):
    exercises.check(NAME, passing)
    before = (notebooks / ".progress" / f"{NAME}.py").read_text()
    moves = []

    def broken(source, target):
        moves.append((os.fspath(source), os.fspath(target), open(source).read()))
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    report = exercises.check(NAME, passing)
    assert report.passed and "Not saved: notebooks/.progress cannot be written (OSError)" in repr(report)
    source, target, text = moves[0]
    assert os.path.dirname(source) == os.path.dirname(target) and text == before
    assert saved(notebooks) == [f"{NAME}.py"], "the temporary file is gone"
    assert (notebooks / ".progress" / f"{NAME}.py").read_text() == before


def test_pass_where_nothing_can_be_written(notebooks, monkeypatch):
    (notebooks / ".progress").write_text("a file where the folder should be")
    report = exercises.check(NAME, passing)
    assert report.passed and "Not saved" in repr(report) and str(notebooks) not in repr(report)
    assert state() == "not yet"
    monkeypatch.setattr(store, "folder", lambda: None)
    report = exercises.check(NAME, passing)
    assert report.passed and "no notebooks folder" in repr(report)
    assert exercises.progress().passed == 0 and exercises.load(NAME) is exercises.get(NAME).reference
    exercises.reset()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", b"def broken(:", b"x = 1\n", b"\x00"])
def test_corrupt_file_is_no_crash(notebooks, content, capsys):
    (notebooks / ".progress").mkdir()
    (notebooks / ".progress" / f"{NAME}.py").write_bytes(content)
    assert state() == "unreadable"
    assert "Unreadable: check it again" in repr(exercises.progress()) + exercises.progress()._repr_html_()
    assert exercises.load(NAME) is exercises.get(NAME).reference
    assert "cannot be read" in capsys.readouterr().out
    assert exercises.check(NAME, passing).passed and state() == "passed"


def test_stale_file_is_checked_again(notebooks, capsys):
    (notebooks / ".progress").mkdir()
    for text in ("def f(factor):\n    return 1.5\n", "1 / 0\ndef f(factor):\n    return 1.0\n"):
        (notebooks / ".progress" / f"{NAME}.py").write_text(text)
        assert exercises.load(NAME) is exercises.get(NAME).reference
        assert "Check the exercise again" in capsys.readouterr().out


def test_map_has_a_tick_and_a_word(notebooks):
    exercises.check(NAME, passing)
    text, page = repr(exercises.progress()), exercises.progress()._repr_html_()
    assert text.startswith(f"1 of {len(exercises.names())} exercises passed")
    line = next(line for line in text.splitlines() if NAME in line)
    assert line.startswith("✓") and line.endswith("passed")
    assert page.count("✓ passed") == 1 and page.count("· not yet") == len(exercises.names()) - 1


def test_a_class_from_a_notebook_cell_is_saved(notebooks, monkeypatch):
    """As in a notebook: the text is known to linecache alone, and a helper of the same name stands above."""
    text = """
def helper():
    class Double:
        def forward(self, x):
            return 3 * x


class Double:
    word = "kept"

    def __init__(self, config):
        self.config = config

    def forward(self, x):
        return 2 * x  # mine
"""
    monkeypatch.setitem(linecache.cache, "<cell 7>", (len(text), None, text.splitlines(keepends=True), "<cell 7>"))
    names = {"__name__": "__main__"}
    exec(compile(text, "<cell 7>", "exec"), names)
    source = store._source(names["Double"])
    assert source.startswith("class Double:") and source.endswith("return 2 * x  # mine\n")
    assert "3 * x" not in source and 'word = "kept"' in source
    assert store._source(type("Bare", (), {})) is None


def test_a_saved_class_works_as_before(notebooks, capsys):
    exercise = Exercise(
        name="01_rmsnorm.Halve",
        title="a class",
        signature="Halve(config)",
        reference=Halve,
        cases=[case("four", 4.0)],
        call=lambda cls, x: cls(None).forward(x),
        arguments=("x",),
    )
    assert "Saved" in store.save(exercise, Halve)
    own = store.load(exercise)
    assert own is not Halve and own(None).forward(3.0) == 1.5
    assert capsys.readouterr().out == "01_rmsnorm.Halve: your own version.\n"
