"""Signals that wait for the right moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def postponed_interrupt() -> Iterator[None]:
    """Ctrl-C, or a notebook's interrupt, waits for the end of the block: inside, weights are half updated."""
    handler, noted = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if noted:
        handler(*noted[-1])
