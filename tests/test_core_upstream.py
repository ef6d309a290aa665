"""The drift record, on small made-up clones: what counts as a change, what does not, and which notebooks are named."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minimind_core import upstream
from minimind_core.exercises import BANKS
from minimind_core.upstream import RECORD, compare, fingerprint, main

NOTEBOOK_FILES = Path(__file__).resolve().parents[1] / "notebooks"
MODEL = "model/model_minimind.py"

TRICKY = '''
import functools


@functools.lru_cache(
    maxsize=3,  # three
)
def tricky(a, *, b: int = 0xFF, c=1_000.5e-3j):
    """A docstring # no comment
    of two lines"""
    x = f"{a!r:>{b}} # no comment {'nested ' + f'{b}'} {{braces}} \\d"
    y = f\'\'\'
    {a} # text

    {b:
    }
    \'\'\' + rb"bytes".decode() + f"" if a else "plain" rf"\\d{b}"

    # comment
    def inner(): return x if (z := a) else not z

    class Empty:
        "only a docstring"

    async def wait():
        async with a as q, b: await q
        return [*a] if 0 else lambda é: é @ 1 // 2 ** 3 -1

    if a \\
            and b:
\t    return x, y, ...
    f"not a docstring {a}"
    "a string alone"
    return inner, Empty, wait  # end
'''

PLAIN = '''
def outside():
    return 0

@decorated(1)
class Part(Base):
    """What it is."""

    size = 3

    def __init__(self, text="a # b"):
        def inner(x):
            return f"{x} # {text:>8}"

        self.inner = inner

    @staticmethod
    def forward(x, y):
        long = """
        one

        two
        """
        return x + y, long

def after():
    return 0
'''


def fake_source(file: str) -> str:
    """Definitions with the recorded names of a file; each body returns its own name."""
    names = [entry.function for entry in RECORD if entry.file == file]
    lines = ["import nothing_that_exists"]
    for name in [name for name in names if "." not in name]:
        methods = [method for method in names if method.startswith(name + ".")]
        if not name[0].isupper():
            lines += [f"def {name}(x):", f"    return x, {name!r}"]
            continue
        lines.append(f"class {name}:")
        for method in methods or [f"{name}.forward"]:
            lines += [f"    def {method.split('.')[1]}(self, x):", f"        return x, {method!r}"]
    lines += [f"def {name}(): pass" for name in sorted(upstream.UNTAUGHT.get(file, ()))]
    return "\n".join(lines) + "\n"


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A made-up clone, and a record that was made of it."""
    record = [replace(entry, hash=fingerprint(fake_source(entry.file), entry.function)) for entry in RECORD]
    monkeypatch.setattr(upstream, "RECORD", record)
    for file in {entry.file for entry in RECORD}:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(fake_source(file))
    return tmp_path


def edit(clone: Path, old: str, new: str, file: str = MODEL) -> None:
    text = (clone / file).read_text()
    assert text.count(old) == 1
    (clone / file).write_text(text.replace(old, new))


def not_same(clone: Path) -> dict[str, str]:
    return {entry.function: status for status, entry in compare(clone).rows if status != "same"}


def test_every_notebook_has_its_entry():
    files = {path.stem for path in NOTEBOOK_FILES.glob("[0-9]*.ipynb")}
    assert files <= {name for entry in RECORD for name in entry.notebooks}
    assert set(upstream.NOTEBOOKS) == {name for entry in RECORD for name in entry.notebooks} == set(BANKS)


def test_the_record_is_well_formed():
    assert (
        len({(entry.file, entry.function) for entry in RECORD}) == len({entry.hash for entry in RECORD}) == len(RECORD)
    )
    assert all(re.fullmatch(r"[0-9a-f]{16}", entry.hash) for entry in RECORD)
    assert all(re.fullmatch(r"[0-9a-f]{7}", entry.commit) for entry in RECORD)


def test_an_unchanged_clone_is_all_the_same(clone, capsys):
    assert not_same(clone) == {} and compare(clone).notebooks == [] and compare(clone).new == []
    assert main([str(clone)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("same ") for line in lines) == len(RECORD)
    assert lines[-1] == f"All {len(RECORD)} recorded functions are the same. No notebook to read again."


def test_a_changed_function_names_its_notebook(clone, capsys):
    edit(clone, "return x, 'repeat_kv'", "return x + 1, 'repeat_kv'")
    assert not_same(clone) == {"repeat_kv": "changed"}
    assert main([str(clone)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^changed +model/model_minimind.py +repeat_kv$", out, re.MULTILINE)
    assert out.splitlines()[-1].endswith(": 04_attention_gqa")


def test_a_changed_method_changes_its_class_too(clone):
    edit(clone, "'MiniMindForCausalLM.generate'", "'faster'")
    assert not_same(clone) == {"MiniMindForCausalLM": "changed", "MiniMindForCausalLM.generate": "changed"}
    assert compare(clone).notebooks == ["00_start_here", "12_the_whole_model", "15_generation"]


def test_one_change_in_a_function_of_two_notebooks_names_both(clone):
    edit(clone, "'MOEFeedForward.forward'", "'guarded'")
    assert compare(clone).notebooks == ["08_moe_gate", "09_moe_dispatch"]


def test_a_function_that_is_gone(clone, capsys):
    edit(clone, "def get_lr(", "def learning_rate(", "trainer/trainer_utils.py")
    assert not_same(clone) == {"get_lr": "gone"}
    assert compare(clone).new == [("trainer/trainer_utils.py", "learning_rate")]
    assert main([str(clone)]) == 1
    assert "gone     trainer/trainer_utils.py    get_lr" in capsys.readouterr().out


def test_a_method_that_is_gone(clone):
    edit(clone, "def generate(", "def write(")
    assert not_same(clone)["MiniMindForCausalLM.generate"] == "gone"


def test_a_file_that_is_gone(clone):
    (clone / "trainer/train_tokenizer.py").unlink()
    assert not_same(clone) == {"train_tokenizer": "gone", "eval_tokenizer": "gone"}
    assert compare(clone).notebooks == ["13_tokenizer"]


def test_a_new_function_is_named_but_asks_for_nothing(clone, capsys):
    with (clone / MODEL).open("a") as file:
        file.write("class MoEGate: pass\n")
    assert main([str(clone)]) == 0
    assert re.search(r"^new +model/model_minimind.py +MoEGate$", capsys.readouterr().out, re.MULTILINE)


def test_comments_and_windows_line_ends_are_no_change(clone):
    for file in {entry.file for entry in RECORD}:
        text = (clone / file).read_text().replace(":\n", ":  # why\n\n").replace("return x", "return  x")
        (clone / file).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert not_same(clone) == {}


@pytest.mark.parametrize(
    "old, new",
    [
        ("        self.inner", "        # a comment\n\n        self.inner"),
        ("size = 3\n", "size = 3   # three  \n"),
        ("size = 3", "size  =  3"),
        ('    """What it is."""\n', ""),
        ("        def inner(x):\n", '        def inner(x):\n            """Two\n\n            lines."""\n'),
        ("return x + y, long", "return x + \\\n    y, long"),
        ("forward(x, y)", "forward(\n        x,  # left\n        y\n    )"),
        ("    return 0\n", "    return 1\n"),
        ("\ndef after", "# of Part?\ndef after"),
    ],
)
def test_what_does_not_count(old, new):
    changed = PLAIN.replace(old, new)
    assert changed != PLAIN
    assert fingerprint(changed, "Part") == fingerprint(PLAIN, "Part")
    assert fingerprint(changed.replace("\n", "\r\n"), "Part") == fingerprint(PLAIN, "Part")


@pytest.mark.parametrize(
    "old, new",
    [
        ("@decorated(1)", "@decorated(2)"),
        ("@decorated(1)\n", ""),
        ("(Base)", ""),
        ("size = 3", "size = 4"),
        ("a # b", "a # c"),
        ("{x} # {text", "{x} #{text"),
        (":>8}", ":>9}"),
        ("            return f", "            yield f"),
        ("one\n\n", "one\n"),
        ("one\n", "one \n"),
        ("    @staticmethod\n", ""),
        ("x + y", "(x + y)"),
        ("        self.inner = inner", "            self.inner = inner"),
    ],
)
def test_what_counts(old, new):
    assert PLAIN.count(old) == 1
    assert fingerprint(PLAIN.replace(old, new), "Part") != fingerprint(PLAIN, "Part")


def test_a_method_has_the_same_fingerprint_wherever_it_stands():
    first = "class Part:\n    def forward(self):\n        if self:\n            return 1\n"
    later = (
        "class Part:\n    def other(self):\n        if self:\n            pass\n" + first.split("\n", 1)[1] + "x = 1\n"
    )
    assert fingerprint(first, "Part.forward") == fingerprint(later, "Part.forward") != fingerprint(later, "Part.other")


def test_the_width_of_an_indentation_does_not_count_its_depth_does():
    four = "def f(x):\n    if x:\n        x = 1\n    return x\n"
    assert fingerprint(four.replace("    ", "\t"), "f") == fingerprint(four, "f")
    assert fingerprint(four.replace("    return", "        return"), "f") != fingerprint(four, "f")


def test_the_last_of_two_definitions_counts():
    assert fingerprint("def f(): return 1\ndef f(): return 2\n", "f") == fingerprint("def f(): return 2", "f")


def test_the_fingerprint_is_the_same_on_every_python():
    """f-strings come as one token or in pieces, depending on the version; the number here is that of 3.10 to 3.14."""
    assert fingerprint(TRICKY, "tricky") == "84e4cdddfabb179c"


@pytest.mark.parametrize("name", ["missing", "Part.missing", "forward", "Part.size"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(LookupError, match=re.escape(repr(name))):
        fingerprint(PLAIN, name)


@pytest.mark.parametrize(
    "path, words", [("nowhere", "is not a folder"), ("a_file", "is not a folder"), (".", "none of")]
)
def test_a_wrong_path(tmp_path, capsys, path, words):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(FileNotFoundError, match=words):
        compare(tmp_path / path)
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / path)])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_python_is_named(clone, capsys):
    (clone / MODEL).write_text("def half(:\n")
    with pytest.raises(SystemExit) as stop:
        main([str(clone)])
    assert stop.value.code == 2
    assert f"{clone / MODEL} cannot be read as Python" in capsys.readouterr().err


def test_the_command(tmp_path):
    """Without a path: the record as a table. With a wrong one: exit code 2 and no traceback."""
    command = [sys.executable, "-m", "minimind_core.upstream"]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert len(table) == 1 + sum(len(entry.notebooks) for entry in RECORD)
    assert table[0].split() == ["notebook", "file", "function", "commit"]
    assert table[4].split() == ["01_rmsnorm", MODEL, "RMSNorm", "0074dcf"]
    wrong = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "is no clone of MiniMind" in wrong.stderr and "Traceback" not in wrong.stderr
