"""Repairs for nbval 0.11.0: it runs the notebooks and compares their stored outputs; this makes the comparison fair.

`repair()` is called by tests/conftest.py and by notebooks/conftest.py, so that a plain `pytest --nbval notebooks/` has
the repairs too. It changes nbval's inside, which is why requirements.txt pins nbval, and tests/test_nbval_repairs.py
shows each repair at work:

1. A dead kernel fails its cell after about a second, not after the cell's time-out.
2. A trailing `;` hides the last value of a cell, as it does for a reader.
3. Numbers with a decimal point are compared with a tolerance. All other text, integers included, is compared exactly.
4. Device names, memory addresses, process ids in paths and encoded pictures do not count as differences.
5. The kernels run with MINIMIND_PROGRESS=off: a test neither reads nor writes a reader's progress.
6. With MINIMIND_DEVICE=cpu a notebook must keep to its budget of seconds and memory (see tests/run_notebooks.py).
"""

from __future__ import annotations

import os
import re
import time
from queue import Empty

from nbval import kernel as nbval_kernel
from nbval import plugin as nbval_plugin

RELATIVE_TOLERANCE = 1e-3
DIGITS_FOR_ROUNDING = 3  # a number shown with so many digits may differ by one unit of the last one
DEAD_KERNEL_POLL = 0.5  # seconds

SAME_ON_EVERY_MACHINE = {
    r",? ?device='(?:cuda(?::\d+)?|cpu|mps(?::\d+)?)'": "",
    r"\b(?:cuda(?::\d+)?|cpu|mps(?::\d+)?)\b": "DEVICE",
    r"\b0x[0-9a-fA-F]{6,}\b": "ADDRESS",
    r"[^\s\"']*[/\\]ipykernel_\d+[/\\]\d+\.py": "CELL.py",
    r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/=]+": "PICTURE",
}

# A decimal point makes a number a measurement; without one (12, 1e-6) it is a count or a bound, and exact.
# The ends keep version numbers such as 2.13.0 out.
DECIMAL = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\.?\d)")


def _unit(number: str) -> float | None:
    """One unit of the last digit shown, or None where fewer than three digits are shown."""
    mantissa, _, exponent = number.lower().lstrip("+-").partition("e")
    decimals = len(mantissa.partition(".")[2])
    digits = max(decimals, len(mantissa.replace(".", "").lstrip("0")))
    return 10.0 ** (int(exponent or 0) - decimals) if digits >= DIGITS_FOR_ROUNDING else None


def same_number(stored: str, new: str) -> bool:
    """Whether two printed numbers with a decimal point agree.

    They may differ by a thousandth, or by one unit of the last digit where three are shown: 1.234 and 1.235 may be two
    roundings of one value. A changed sign is always a difference.
    """
    if stored == new:
        return True
    if stored.endswith(".") and new.endswith("."):  # whole numbers, at the end of a sentence or in a tensor
        return False
    a, b = float(stored), float(new)
    if a * b < 0:
        return False
    units = [unit for unit in (_unit(stored), _unit(new)) if unit is not None]
    allowed = max([RELATIVE_TOLERANCE * max(abs(a), abs(b)), *units])
    return abs(a - b) <= allowed * (1 + 1e-9)


def _frame(text: str) -> str:
    """The text with its numbers taken out and the padding of columns evened out."""
    return re.sub(r"[ \t]+", " ", DECIMAL.sub("#", text)).replace("[ ", "[").replace("\n ", "\n").strip(" ")


def same_text(stored: str, new: str) -> bool:
    """Whether two outputs are equal, numbers with a decimal point compared by `same_number`."""
    if stored == new:
        return True
    if _frame(stored) != _frame(new):
        return False
    return all(map(same_number, DECIMAL.findall(stored), DECIMAL.findall(new)))


class _Output(str):
    """An output's text whose equality is `same_text`: nbval compares with `!=`."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return same_text(str(self), str(other)) if isinstance(other, str) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other


def _start_kernel(self, *args, _original=nbval_kernel.RunningKernel.__init__, **kwargs) -> None:
    os.environ["MINIMIND_PROGRESS"] = "off"  # the kernel inherits it
    _original(self, *args, **kwargs)


def _await_reply(self, msg_id: str, timeout: float | None = None) -> None:
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        wait = DEAD_KERNEL_POLL if end is None else min(DEAD_KERNEL_POLL, max(0.01, end - time.monotonic()))
        try:
            message = self.get_message(stream="shell", timeout=wait)
        except Empty:
            if not self.is_alive():
                raise RuntimeError(
                    "The kernel died while it ran this cell: out of memory, or a crash in compiled code."
                ) from None
            if end is not None and time.monotonic() >= end:
                raise
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            if message["content"]["status"] == "aborted":
                raise RuntimeError("The kernel aborted the request to run this cell.")
            return


def _execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> str:
    # store_history=True is what JupyterLab sends; without it IPython shows the value before a `;`.
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


def _sanitize(self, text, _original=nbval_plugin.IPyNbCell.sanitize):
    text = _original(self, text)
    return _Output(text) if isinstance(text, str) else text


def _setup(self, _original=nbval_plugin.IPyNbFile.setup) -> None:
    self.sanitize_patterns.update(SAME_ON_EVERY_MACHINE)
    self.started = time.perf_counter()
    _original(self)


def _teardown(self, _original=nbval_plugin.IPyNbFile.teardown) -> None:
    from run_notebooks import Cost, kernel_usage, over_budget

    fault = None
    if self.kernel is not None and self.kernel.is_alive():
        seconds = time.perf_counter() - self.started
        cost = Cost(seconds, *kernel_usage(self.kernel.km.provisioner.pid))
        if os.environ.get("MINIMIND_DEVICE") == "cpu":
            fault = over_budget(self.path.stem, cost)
    _original(self)
    if fault:
        raise AssertionError(f"over the budget: {fault}")


def repair() -> None:
    """Apply the repairs. A second call changes nothing."""
    kernel, cell, notebook = nbval_kernel.RunningKernel, nbval_plugin.IPyNbCell, nbval_plugin.IPyNbFile
    kernel.__init__ = _start_kernel
    kernel.await_reply = _await_reply
    kernel.execute_cell_input = _execute_cell_input
    cell.sanitize = _sanitize
    notebook.setup = _setup
    notebook.teardown = _teardown
