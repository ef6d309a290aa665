"""The repository as a newcomer meets it: the README's promises, the top level, the make targets, the import."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from jupyter_server.services.kernels.connection.channels import ZMQChannelsWebsocketConnection
from traitlets.config import Config

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TOP_LEVEL = {
    "notebooks",
    "minimind_core",
    "figures",
    "tests",
    "requirements.txt",
    "README.md",
    "pyproject.toml",
    "Makefile",
    "LICENSE",
}
HEAVY = ("matplotlib", "ipywidgets", "anywidget", "IPython", "transformers", "tokenizers", "safetensors", "traitlets")
IMPORT_SECONDS = 0.2  # beyond torch


def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.splitlines()


def test_top_level_holds_only_what_it_should():
    names = {name.split("/")[0] for name in _tracked()}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL


def test_readme_names_only_targets_that_exist():
    named = set(re.findall(r"\bmake ([a-z][a-z-]+)", README + (ROOT / ".ci" / "run").read_text())) - {"which"}
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert {"lab", "test", "test-gpu", "figures"} <= named <= targets
    assert re.search(r"^\.DEFAULT_GOAL := lab$", MAKEFILE, re.MULTILINE)


def test_every_script_that_make_runs_exists():
    scripts = re.findall(r"(?:tests|figures)/\w+\.py", MAKEFILE)
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []


def test_readme_links_lead_to_files():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_lists_every_notebook():
    listed = set(re.findall(r"\(notebooks/(\w+\.ipynb)\)", README))
    assert listed == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_readme_example_runs(tmp_path):
    """The six lines work on a checkpoint as MiniMind stores it: half precision, the tied matrix under both names."""
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(example.strip().splitlines()) == 6
    name = re.search(r'torch\.load\("([^"]+)"\)', example)[1]
    prepare = (
        "import torch\n"
        "from minimind_core import MiniMindConfig, MiniMindForCausalLM\n"
        "torch.manual_seed(0)\n"
        "weights = MiniMindForCausalLM(MiniMindConfig()).half().state_dict()\n"
        "assert 'lm_head.weight' in weights and 'model.embed_tokens.weight' in weights\n"
        f"torch.save(weights, {name!r})\n"
    )
    for code in (prepare, example):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    (tmp_path / name).unlink()
    assert re.match(r"tensor\(\[\[\s*1,\s*320,\s*275", done.stdout)


def test_import_loads_nothing_heavy():
    code = f"import sys, minimind_core; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_import_costs_little_beyond_torch():
    code = "import time, torch; start = time.perf_counter(); import minimind_core; print(time.perf_counter() - start)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    # Other work on the machine only adds time, so the least of three is the import itself.
    assert min(runs) <= IMPORT_SECONDS, f"{min(runs):.2f} s (median {statistics.median(runs):.2f} s)"


def test_core_requirements_are_torch_and_einops():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"(\w+)>=', re.search(r"^dependencies = \[(.*)\]", project, re.MULTILINE)[1]) == [
        "torch",
        "einops",
    ]


def test_old_python_is_named_with_the_fix(tmp_path):
    """With only an old Python to be found, make says which one it found and what to do."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("make", "sh", "id", "grep", "rm", "mkdir", "touch"):
        if (found := shutil.which(tool)) is None:
            pytest.skip(f"no {tool} on this machine")
        (tools / tool).symlink_to(found)
    old = tools / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *version.split*) echo 3.9.6;; *) exit 1;; esac\n')
    old.chmod(0o755)
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".jupyter", tmp_path / ".jupyter")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    environment["PATH"] = str(tools)
    done = subprocess.run(["make", "lab"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "need Python 3.11 or newer. Found: python3 (3.9.6)." in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_kernel_s_messages_are_not_held_back():
    """The server's file, as Jupyter reads it: connections without Nagle's delay. And make puts it where they look."""
    config = Config()
    exec((ROOT / ".jupyter" / "jupyter_server_config.py").read_text(), {"get_config": lambda: config})
    connection = config.ServerApp.kernel_websocket_connection_class
    calls = []
    connected = SimpleNamespace(websocket_handler=SimpleNamespace(set_nodelay=calls.append))
    with pytest.raises(TypeError):  # the rest is Jupyter's, and needs a kernel
        connection.connect(connected)
    assert calls == [True] and issubclass(connection, ZMQChannelsWebsocketConnection)
    assert "cp .jupyter/jupyter_server_config.py $(VENV)/etc/jupyter\n" in MAKEFILE


@pytest.mark.parametrize("ci, outcome", [("true", "failed"), ("", "skipped")])
def test_a_missing_browser_fails_only_in_ci(pytester, monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("MINIMIND_CHROMIUM", "no-such-browser")
    source = (ROOT / "tests" / "conftest.py").read_text().replace("from nbval_repairs import repair", "")
    pytester.makeconftest(source.replace("repair()\n", ""))
    pytester.makepyfile("from conftest import find_chromium\n\ndef test_page():\n    find_chromium()\n")
    result = pytester.runpytest_subprocess("-rsf", "-p", "no:cacheprovider")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*no Chromium or Chrome found*"])
