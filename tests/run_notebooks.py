"""Execute notebooks in place, as a reader's kernel would, and store tidy outputs.

    python tests/run_notebooks.py notebooks/01_rmsnorm.ipynb      execute, store, print seconds and memory
    python tests/run_notebooks.py --check notebooks/*.ipynb       store nothing; fail over the budget

The kernel runs on the CPU and with progress off, so that every machine stores the same text. Two time-outs guard each
run: one for a cell and one for the notebook. A cell that raises stops the run unless it has the tag `raises-exception`,
and the file then stays as it was.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

CELL_TIMEOUT = 120  # seconds
NOTEBOOK_TIMEOUT = 300  # seconds
KERNEL_ENVIRONMENT = {"MINIMIND_PROGRESS": "off", "MINIMIND_DEVICE": "cpu"}
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_METADATA = ("tags",)  # everything else in a cell's metadata is dropped

SECONDS = {"14_training": 60.0}  # this one trains two models; the others:
SECONDS_DEFAULT = 20.0
MEMORY_MB = {"00_start_here": 2048.0, "12_the_whole_model": 1536.0}  # these build the whole model twice; the others:
MEMORY_MB_DEFAULT = 1024.0


@dataclass(frozen=True)
class Cost:
    """What one run of a notebook took: wall seconds, processor seconds, peak resident memory of the kernel in MB."""

    seconds: float
    processor_seconds: float
    memory_mb: float

    def __str__(self) -> str:
        return f"{self.seconds:5.1f} s  {self.memory_mb:5.0f} MB"


def kernel_usage(pid: int) -> tuple[float, float]:
    """Processor seconds and peak resident memory in MB of a living process.

    Linux and Windows keep the peak. Elsewhere the present size stands in for it, which may be too small.
    """
    import psutil  # comes with ipykernel

    process = psutil.Process(pid)
    times = process.cpu_times()
    memory = process.memory_info()
    peak = getattr(memory, "peak_wset", memory.rss) / 2**20
    status = Path(f"/proc/{pid}/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        peak = int(found[1]) / 2**10
    return times.user + times.system, peak


def over_budget(name: str, cost: Cost) -> str | None:
    """Say what a notebook overspent, or None.

    Time is over the budget only if wall and processor seconds both are: another test on the same cores makes the wall
    clock run, but not the processor's.
    """
    seconds_limit, memory_limit = SECONDS.get(name, SECONDS_DEFAULT), MEMORY_MB.get(name, MEMORY_MB_DEFAULT)
    faults = []
    if min(cost.seconds, cost.processor_seconds) > seconds_limit:
        faults.append(f"{cost.seconds:.1f} s is over {seconds_limit:.0f} s: shorten the work or make tensors smaller")
    if cost.memory_mb > memory_limit:
        faults.append(f"{cost.memory_mb:.0f} MB is over {memory_limit:.0f} MB: delete large tensors or shrink them")
    return f"{name}: " + "; ".join(faults) if faults else None


async def _run(notebook: nbformat.NotebookNode, folder: Path) -> Cost:
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name=KERNELSPEC["name"],
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        record_timing=False,
        coalesce_streams=True,
    )
    start = time.perf_counter()
    async with client.async_setup_kernel(env={**os.environ, **KERNEL_ENVIRONMENT}):
        for index, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
        processor_seconds, memory_mb = kernel_usage(client.km.provisioner.pid)
        return Cost(time.perf_counter() - start, processor_seconds, memory_mb)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> Cost:
    """Run every code cell of `notebook` in a fresh kernel that works in `folder`; the outputs are stored in `notebook`.

    Raises RuntimeError, with the reason in words, if a cell raises without the tag, a time-out is hit or
    the kernel dies.
    """
    try:
        return asyncio.run(asyncio.wait_for(_run(notebook, folder), NOTEBOOK_TIMEOUT))
    except CellExecutionError as error:
        raise RuntimeError(f"a cell raised and has no tag raises-exception\n{error}") from error
    except CellTimeoutError as error:
        raise RuntimeError(f"a cell ran longer than {CELL_TIMEOUT} s\n{error}") from error
    except DeadKernelError as error:
        raise RuntimeError("the kernel died: out of memory, or a crash in compiled code") from error
    except asyncio.TimeoutError as error:
        raise RuntimeError(f"the notebook ran longer than {NOTEBOOK_TIMEOUT} s") from error


def normalize(notebook: nbformat.NotebookNode) -> None:
    """Remove, in place, all that differs from run to run and teaches nothing.

    Cell ids follow from the cell's own text, so that an edit changes one id and an inserted cell none.
    """
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        cell.source = cell.source.rstrip()
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in CELL_METADATA if cell.metadata.get(key)})
        name = hashlib.sha1(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[name] = seen.get(name, 0) + 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"
        if cell.cell_type == "code":
            for number, output in enumerate(cell.outputs):
                if "metadata" in output:
                    output.metadata = nbformat.from_dict({})
                output.pop("transient", None)
                if view := output.get("data", {}).get("application/vnd.jupyter.widget-view+json"):
                    view["model_id"] = hashlib.sha1(f"{cell.id} {number}".encode()).hexdigest()[:32]
        else:
            cell.pop("attachments", None)


def save(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write beside the notebook, then rename: a broken run never leaves half a file."""
    nbformat.validate(notebook)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(nbformat.writes(notebook).rstrip("\n") + "\n")
        os.chmod(name, path.stat().st_mode & 0o777)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute notebooks and store their outputs.")
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="store nothing; fail when a notebook is over its budget")
    options = parser.parse_args(arguments)
    failed = False
    for path in options.notebooks:
        notebook = nbformat.read(path, as_version=4)
        try:
            cost = execute(notebook, path.resolve().parent)
        except RuntimeError as error:
            print(f"{path}: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"{path}  {cost}", flush=True)
        if fault := over_budget(path.stem, cost):
            print(fault, file=sys.stderr)
            failed = failed or options.check
        if not options.check:
            normalize(notebook)
            save(notebook, path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
