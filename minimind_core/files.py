"""Files that are never half written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], None]) -> None:
    """Let write(file) fill a temporary file beside `path`, then rename it: `path` holds the old or the new, whole.

    Source: POSIX, rename: the new name never points to nothing, and never to half a file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.unfinished")  # one name: what a kill leaves, the next writer takes
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # on the disk before the name is
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """The same for a text, in UTF-8."""
    write_atomically(path, lambda file: file.write(text.encode()))
