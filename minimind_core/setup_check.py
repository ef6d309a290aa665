"""Is everything here that the notebooks need? Names what is wrong, and the fix.

Python's own library is all that this file needs, so notebook 00 can run it even where nothing is installed:

    check_setup = runpy.run_path("../minimind_core/setup_check.py")["check_setup"]
"""

import importlib
import importlib.metadata
import importlib.util
import re
import sys

PYTHON = (3, 10)
PACKAGES = {  # package: the oldest version that will do (pyproject.toml says the same)
    "torch": "2.6",
    "einops": "0.8",
    "matplotlib": "3.8",
    "ipywidgets": "8.1",
    "anywidget": "0.9",
}
RESTART = "then restart the kernel (menu Kernel, Restart Kernel)"


def check_setup() -> None:
    """Print one line for each thing that the notebooks need: `ok`, or what is wrong and how to mend it."""
    faults = 0
    for need, problem, fix in _needs():
        print(f"WRONG  {need}: {problem}" if problem else f"ok     {need}")
        if problem:
            faults += 1
            print(f"       Fix: {fix}")
    print(f"{faults} to mend, from the top; then run this cell again." if faults else "Everything is here.")


def _needs():
    """(need, problem or "", fix), in the order in which faults should be mended."""
    yield (
        f"Python {PYTHON[0]}.{PYTHON[1]} or newer",
        "" if sys.version_info[:2] >= PYTHON else f"this kernel runs {sys.version_info[0]}.{sys.version_info[1]}",
        "install a newer Python from python.org, delete the folder .venv, and run `make lab`",
    )
    foreign = importlib.util.find_spec("minimind_core") is None
    yield (
        "a kernel that knows minimind_core",
        "this one does not, so it is not the kernel of this project" if foreign else "",
        "close JupyterLab and start it with `make lab`; in another editor, choose the Python in the folder .venv",
    )
    if foreign:
        return  # what else is missing there does not matter
    for package, oldest in PACKAGES.items():
        yield f"{package} {oldest} or newer", *_package(package, oldest)
    yield "minimind_core can be imported", *_core()
    yield "the CPU, or the GPU if there is one, computes", *_device()


def _package(package: str, oldest: str) -> tuple[str, str]:
    install = f'run `%pip install "{package}>={oldest}"` in a new cell, {RESTART}'
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed for this kernel", install
    if _numbers(found) < _numbers(oldest):
        return f"version {found} is too old", install
    try:
        importlib.import_module(package)
    except Exception as error:
        again = f"run `%pip install --force-reinstall {package}` in a new cell, {RESTART}"
        return f"version {found} is installed, but importing it fails with {type(error).__name__}: {error}", again
    return "", ""


def _core() -> tuple[str, str]:
    try:
        importlib.import_module("minimind_core")
    except Exception as error:
        return (
            f"importing it fails with {type(error).__name__}: {error}",
            "mend the lines above; if they are all ok, undo the last change in the folder minimind_core",
        )
    return "", ""


def _device() -> tuple[str, str]:
    try:
        import torch

        core = importlib.import_module("minimind_core")
        ones = torch.ones(2, 2, device=core.pick_device())
        total = ones.mm(ones).sum().item()
    except ImportError:
        return "it can't be tried yet", "mend the lines above first"
    except Exception as error:
        return (
            f"{type(error).__name__}: {error}",
            f"put `%env MINIMIND_DEVICE=cpu` into a new cell at the top, {RESTART} and run both",
        )
    return ("", "") if total == 8 else (f"2 x 2 ones, squared, sum to {total}, not 8", "use another device")


def _numbers(version: str) -> list[int]:
    """The first two numbers of a version: "2.13.0+cu126" -> [2, 13]."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
