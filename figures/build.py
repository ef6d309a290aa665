"""Rebuild the pictures in figures/ from the explorers' own drawing code.

    python figures/build.py    writes map.png, live_training.png and explorer_<name>.png of every explorer, and prints
                               the alt text of each

Each picture carries the numbers that it shows and its sentence as PNG text. The tests compare these with what the
explorer computes today, so a picture can't silently fall behind, while its bytes may differ between machines.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from minimind_core import explorers
from minimind_core.explorers import model_map, style
from minimind_core.explorers.shell import Explorer

FOLDER = Path(__file__).parent
DPI = 160


def pictures() -> Iterator[tuple[str, Explorer]]:
    """File name and explorer of every picture: the default state, then the module's STILLS."""
    for name in explorers.names():
        module = explorers.module(name)
        yield f"explorer_{name}.png", module.explore()
        for still, values in getattr(module, "STILLS", {}).items():
            yield f"explorer_{name}_{still}.png", module.explore(**values)


def plain(numbers: dict) -> dict[str, list[float]]:
    """Numbers of a Result as flat lists, rounded to six digits."""
    flat = {key: np.asarray(value, dtype=float).ravel() for key, value in numbers.items()}
    return {key: [float(f"{number:.6g}") for number in values] for key, values in flat.items()}


def save(path: Path, explorer: Explorer) -> None:
    """Write the explorer's present picture."""
    text = {"Description": explorer.sentence, "Numbers": json.dumps(plain(explorer.result.numbers)), "Software": None}
    with style.applied():
        explorer.figure.savefig(path, dpi=DPI, metadata=text)


def save_map(path: Path) -> None:
    """Write the map of the model."""
    with style.applied():
        figure = style.figure(*model_map.SIZE)
        model_map.draw(figure)
        figure.savefig(path, dpi=DPI, metadata={"Description": model_map.ALT, "Software": None})


def save_live(path: Path) -> str:
    """Write the live view of a training as notebook 14 has stored it, after its last update. Returns what it is."""
    for cell in json.loads((FOLDER.parent / "notebooks" / "14_training.ipynb").read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            words = "".join(output.get("data", {}).get("text/plain", ""))
            if words.startswith("<Explorer live:"):
                path.write_bytes(base64.b64decode(output["data"]["image/png"]))
                return words
    raise ValueError("notebooks/14_training.ipynb stores no live view: run tests/run_notebooks.py on it")


def main() -> None:
    save_map(FOLDER / "map.png")
    print(f"map.png\n    {model_map.ALT}")
    print(f"live_training.png\n    {save_live(FOLDER / 'live_training.png')}")
    wanted = dict(pictures())
    for old in FOLDER.glob("explorer_*.png"):
        if old.name not in wanted:
            old.unlink()
            print(f"removed {old.name}")
    for name, explorer in wanted.items():
        save(FOLDER / name, explorer)
        print(f"{name}\n    {explorer.sentence}")


if __name__ == "__main__":
    main()
