"""The set-up check of notebook 00: each fault is planted once and must be named, with a fix."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimind_core import setup_check

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "minimind_core" / "setup_check.py"


def report(capsys) -> list[str]:
    setup_check.check_setup()
    return capsys.readouterr().out.splitlines()


def wrong(lines: list[str]) -> list[tuple[str, str]]:
    """(problem, fix) of each fault."""
    pairs = zip(lines, [*lines[1:], ""], strict=True)
    return [(line[7:], fix.strip()) for line, fix in pairs if line.startswith("WRONG")]


def test_all_is_well(capsys):
    lines = report(capsys)
    assert lines[-1] == "Everything is here."
    assert len(lines) == 10 and all(line.startswith("ok     ") for line in lines[:-1])
    assert not re.search(r"\bcpu\b|\bcuda\b|/|\d+\.\d+\.\d+", "\n".join(lines)), "names the machine"


def test_bounds_are_those_of_pyproject():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = project["dependencies"] + project["optional-dependencies"]["notebooks"]
    bounds = dict(need.split(">=") for need in needs if ">=" in need)
    assert {name: bounds[name] for name in setup_check.PACKAGES} == setup_check.PACKAGES
    assert project["requires-python"] == f">={setup_check.PYTHON[0]}.{setup_check.PYTHON[1]}"


def test_old_python(capsys, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1, "final", 0))
    ((problem, fix),) = wrong(report(capsys))
    assert "Python 3.10 or newer: this kernel runs 3.9" in problem and "make lab" in fix


@pytest.mark.parametrize("package", setup_check.PACKAGES)
@pytest.mark.parametrize("found", ["0.1", None])
def test_old_or_missing_package(package, found, capsys, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == package and found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found if name == package else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    lines = report(capsys)
    ((problem, fix),) = wrong(lines)
    assert problem.startswith(package) and ("too old" in problem if found else "not installed" in problem)
    assert f'%pip install "{package}>={setup_check.PACKAGES[package]}"' in fix and "restart" in fix
    assert lines[-1].startswith("1 to mend")


@pytest.mark.parametrize("version, enough", [("2.6.0", True), ("2.13.0+cu126", True), ("2.5.1", False), ("3", True)])
def test_versions_are_compared_as_numbers(version, enough, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    problem, _ = setup_check._package("torch", "2.6")
    assert (problem == "") == enough


def test_package_that_cannot_be_imported(capsys, monkeypatch):
    real = importlib.import_module

    def load(name, *rest):
        if name == "matplotlib":
            raise OSError("a library is missing")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", load)
    ((problem, fix),) = wrong(report(capsys))
    assert "OSError: a library is missing" in problem and "--force-reinstall matplotlib" in fix


def test_foreign_kernel(capsys, monkeypatch):
    """A kernel of another environment: that alone is said, not each package that it lacks too."""
    monkeypatch.setitem(sys.modules, "minimind_core", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    ((problem, fix),) = wrong(report(capsys))
    assert "not the kernel of this project" in problem and "make lab" in fix and ".venv" in fix


def test_broken_core(capsys, monkeypatch):
    real = importlib.import_module

    def load(name, *rest):
        if name == "minimind_core":
            raise SyntaxError("invalid syntax (model.py, line 3)")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", load)
    assert "SyntaxError: invalid syntax (model.py, line 3)" in wrong(report(capsys))[0][0]


def test_device_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setenv("MINIMIND_DEVICE", "mps" if torch.cuda.is_available() else "cuda")
    ((problem, fix),) = wrong(report(capsys))
    assert "RuntimeError: MINIMIND_DEVICE=" in problem and "%env MINIMIND_DEVICE=cpu" in fix
    monkeypatch.setenv("MINIMIND_DEVICE", "tpu")
    assert "choose one of auto" in wrong(report(capsys))[0][0]


def test_device_that_computes_wrongly(capsys, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "mm", lambda a, b: a)
    ((problem, _),) = wrong(report(capsys))
    assert "sum to 4.0, not 8" in problem


def test_runs_where_nothing_is_installed(tmp_path):
    """As notebook 00 runs it: by path, with a Python that has no packages at all."""
    code = f"import runpy; runpy.run_path({str(FILE)!r})['check_setup']()"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith("ok     Python") and lines[-1] == "1 to mend, from the top; then run this cell again."
    assert "not the kernel of this project" in wrong(lines)[0][0]


def test_runs_where_only_the_core_is_installed(tmp_path):
    code = f"import runpy, sys; sys.path.append({str(ROOT)!r}); runpy.run_path({str(FILE)!r})['check_setup']()"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    problems = [problem.split()[0] for problem, _ in wrong(run.stdout.splitlines())]
    assert problems == [*setup_check.PACKAGES, "minimind_core", "the"]
