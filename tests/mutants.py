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
import shutil
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from mutants_list import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
COPIED = ("minimind_core", "tests", "notebooks", "figures", "pyproject.toml")
RUN_LIMIT = 180  # seconds for one run of pytest: a fault may also make the core hang, which counts as noticed
WORKERS = 2
PYTEST = ("-x", "-q", "-p", "no:cacheprovider")
NBVAL = ("--nbval", "--nbval-current-env", "--nbval-cell-timeout=120")
ENVIRONMENT = {"MINIMIND_DEVICE": "cpu", "MINIMIND_PROGRESS": "off", "OMP_NUM_THREADS": "1"}


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
    """Run pytest in the copy. True if something failed or did not end, False if all passed.

    It runs in a fork of this process, which has imported torch and transformers but nothing of ours.
    """
    pid, deadline = os.fork(), time.monotonic() + RUN_LIMIT
    if pid == 0:
        _become_pytest(copy, arguments)
    ended = 0
    try:
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            time.sleep(0.02)
    finally:
        if not ended:
            os.killpg(pid, signal.SIGKILL)  # pytest and the kernel that it started
            os.waitpid(pid, 0)
    if not ended:
        return True
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, 2):  # 2: the fault broke an import
        log = (copy / "log.txt").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"pytest could not run {' '.join(arguments)} (code {code}):\n{log[-3000:]}")
    return code != 0


def _become_pytest(copy: Path, arguments: tuple[str, ...]):
    """The fork's whole life: pytest in the copy, its output in log.txt. Never returns."""
    code = 3
    try:
        os.setsid()
        log = os.open(copy / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(copy)
        os.environ.update(ENVIRONMENT, PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")  # for the notebooks' kernels
        sys.path[:0] = [str(copy)]  # before the installed package
        sys.path.remove(str(ROOT / "tests"))
        sys.dont_write_bytecode = True  # two faults within one second would share a cached module
        import pytest

        code = int(pytest.main([*PYTEST, *arguments]))
        import minimind_core

        if NBVAL[0] not in arguments and Path(minimind_core.__file__).parents[1] != copy:
            print(f"{minimind_core.__file__} was tested, not the copy")
            code = 3
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    tests = test_files(tuple(sorted({name for mutant in mutants for name in mutant.tests})))
    notebooks = sorted({file for mutant in mutants for file in notebook_files(mutant.notebooks, copy)})
    for arguments in [tests] + [[*NBVAL, file] for file in notebooks]:
        if fails(copy, *arguments):
            log = (copy / "log.txt").read_text(encoding="utf-8", errors="replace")
            raise SystemExit(
                f"{log[-3000:]}\nthis fails without any fault: pytest {' '.join(arguments)}; mend it first"
            )


def work(mutant: Mutant, folder: Path, give_up: float) -> Verdict:
    """One fault, in this worker's own copy."""
    if time.monotonic() > give_up:
        return Verdict()
    copy = folder / str(os.getpid())
    if not copy.exists():
        shutil.copytree(folder / "plain", copy)
    return plant(mutant, copy)


def main() -> int:
    """Run the faults and print one line each; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults to run; all unless given")
    parser.add_argument("--minutes", type=float, default=30, help="time for everything; 30 unless given")
    chosen = parser.parse_args()
    names = chosen.names
    if unknown := set(names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"unknown faults: {', '.join(sorted(unknown))}")
    if not hasattr(os, "fork"):
        parser.error("planting faults needs fork: use Linux or macOS")
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    start = time.monotonic()
    os.environ.update(ENVIRONMENT)  # one thread each, before torch is there
    import nbval.plugin  # noqa: F401
    import torch  # noqa: F401
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folder, verdicts = Path(name).resolve(), []
        check_without_a_fault(mutants, copy_of_the_repository(folder / "plain"))
        print(f"without a fault everything passes; {len(mutants)} faults follow", flush=True)
        with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as workers:
            futures = [workers.submit(work, mutant, folder, start + 60 * chosen.minutes) for mutant in mutants]
            try:
                for mutant, future in zip(mutants, futures, strict=True):
                    verdicts.append(verdict := future.result())
                    print(f"{mutant.file:<17} {mutant.name:<42} {verdict!s:<20} {verdict.seconds:5.1f} s", flush=True)
            finally:
                workers.shutdown(wait=False, cancel_futures=True)
    return report(mutants, verdicts, time.monotonic() - start)


def report(mutants: list[Mutant], verdicts: list[Verdict], seconds: float) -> int:
    """Print the shares; the exit code."""
    by_tests, by_nbval = (sum(bool(getattr(v, name)) for v in verdicts) for name in ("tests", "notebooks"))
    without = sum(verdict.notebooks is None for verdict in verdicts)
    print(f"\ncaught by the tests: {by_tests} of {len(verdicts)}")
    print(f"caught by nbval alone: {by_nbval} of {len(verdicts)} ({without} have no notebook yet)")
    print(f"{seconds / 60:.1f} minutes")
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        if verdict.tests is None:
            print(f"not run, the time was over: {mutant.name}")
        elif not verdict.tests:
            print(f"missed by the tests: {mutant.name} ({mutant.file})")
    return 0 if all(verdict.tests for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
