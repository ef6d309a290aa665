"""Plant known faults in the core, one at a time, and see who notices: the tests, the notebooks, or both.

    python tests/mutants.py                    every fault of mutants_list.py
    python tests/mutants.py "ramp reversed"    these faults only

The faults go into copies of the repository in a temporary folder, never into the working tree. Each fault runs its
part's tests and its notebooks (those that exist), both up to the first failure. Exit code 1 if the tests miss a fault,
if the copies do not pass without one, or if the time is over.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants_list import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
COPIED = ("minimind_core", "tests", "notebooks", "figures", "pyproject.toml")
LIMIT = 30 * 60  # seconds for everything
RUN_LIMIT = 180  # seconds for one run of pytest: a fault may also make the core hang, which counts as noticed
WORKERS = 2
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-cell-timeout=60")


@dataclass(frozen=True)
class Verdict:
    """Who noticed one fault. None: nobody was asked."""

    tests: bool | None = None
    notebooks: bool | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        who = [name for name in ("tests", "nbval") if getattr(self, "notebooks" if name == "nbval" else name)]
        words = {0: "NOBODY", 1: who[0] if who else "", 2: "both"}[len(who)]
        return words + (" (no notebook)" if self.notebooks is None else "")


def copy_of_the_repository(folder: Path) -> Path:
    """The working tree's own files in an empty folder, without caches and without a reader's progress."""
    ignored = shutil.ignore_patterns("__pycache__", ".progress", ".ipynb_checkpoints")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def fails(copy: Path, *arguments: str) -> bool:
    """Run pytest in the copy. True if something failed or did not end, False if all passed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),  # before the installed package, for the notebooks' kernels too
        "PYTHONDONTWRITEBYTECODE": "1",  # two faults within one second would share a cached module
        "MINIMIND_DEVICE": "cpu",
        "MINIMIND_PROGRESS": "off",
        "OMP_NUM_THREADS": "1",
    }
    command = [*PYTEST, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=copy, env=environment, start_new_session=True, **pipes) as run:
        try:
            output, _ = run.communicate(timeout=RUN_LIMIT)
        except subprocess.TimeoutExpired:
            return True
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)  # pytest and the kernel that it started
    if run.returncode not in (0, 1, 2):  # 2: the fault broke an import
        raise RuntimeError(f"pytest could not run {' '.join(arguments)} (code {run.returncode}):\n{output[-3000:]}")
    return run.returncode != 0


def test_files(names: tuple[str, ...]) -> list[str]:
    return [f"tests/test_core_{name}.py" for name in names]


def notebook_files(numbers: tuple[str, ...], copy: Path) -> list[str]:
    """The notebooks with these numbers, as far as they exist."""
    return [f"notebooks/{path.name}" for number in numbers for path in copy.glob(f"notebooks/{number}_*.ipynb")]


def plant(mutant: Mutant, copy: Path) -> Verdict:
    """Put the fault into the copy, ask the tests and the notebooks, take it out again."""
    file, start = copy / "minimind_core" / mutant.file, time.monotonic()
    source = file.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: its snippet occurs {source.count(mutant.old)} times in {mutant.file}, not once"
        )
    notebooks = notebook_files(mutant.notebooks, copy)
    try:
        file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        by_tests = fails(copy, *test_files(mutant.tests))
        by_notebooks = fails(copy, *NBVAL, *notebooks) if notebooks else None
    finally:
        file.write_text(source, encoding="utf-8")
    return Verdict(by_tests, by_notebooks, time.monotonic() - start)


def check_without_a_fault(mutants: list[Mutant], copy: Path):
    """What fails anyway can notice nothing."""
    tests = sorted({name for mutant in mutants for name in mutant.tests})
    notebooks = sorted({file for mutant in mutants for file in notebook_files(mutant.notebooks, copy)})
    where = [sys.executable, "-c", "import minimind_core; print(minimind_core.__file__)"]
    found = subprocess.run(where, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True)
    if Path(found.stdout.strip()).resolve().parents[1] != copy.resolve():
        raise SystemExit(f"the copy is not what is imported, but {found.stdout.strip() or found.stderr}")
    for arguments in [test_files(tuple(tests))] + [[*NBVAL, file] for file in notebooks]:
        if fails(copy, *arguments):
            raise SystemExit(f"these fail without any fault, mend them first: pytest {' '.join(arguments)}")


def main() -> int:
    """Run the faults and print one line each; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults to run; all unless given")
    names = parser.parse_args().names
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    start, copies = time.monotonic(), queue.SimpleQueue()

    def run(mutant: Mutant) -> Verdict:
        if time.monotonic() - start > LIMIT:
            return Verdict()
        copy = copies.get()
        try:
            return plant(mutant, copy)
        finally:
            copies.put(copy)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(WORKERS) as workers:
        for number in range(WORKERS):
            (copy := Path(folder, str(number))).mkdir()
            copies.put(copy_of_the_repository(copy))
        check_without_a_fault(mutants, copy)
        print(f"without a fault everything passes; {len(mutants)} faults follow", flush=True)
        verdicts = []
        for mutant, verdict in zip(mutants, workers.map(run, mutants), strict=True):
            verdicts.append(verdict)
            print(f"{mutant.file:<17} {mutant.name:<42} {verdict!s:<20} {verdict.seconds:5.1f} s", flush=True)
    return report(mutants, verdicts, time.monotonic() - start)


def report(mutants: list[Mutant], verdicts: list[Verdict], seconds: float) -> int:
    """Print the shares; the exit code."""
    asked = [verdict for verdict in verdicts if verdict.notebooks is not None]
    print(f"\ncaught by the tests: {sum(verdict.tests is True for verdict in verdicts)} of {len(verdicts)}")
    print(
        f"caught by nbval alone: {sum(verdict.notebooks for verdict in asked)} of the {len(asked)} that have a notebook"
    )
    print(f"{seconds / 60:.1f} minutes")
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        if verdict.tests is None:
            print(f"not run within {LIMIT // 60} minutes: {mutant.name}")
        elif not verdict.tests:
            print(f"missed by the tests: {mutant.name} ({mutant.file})")
    return 0 if all(verdict.tests for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
