"""How fast are the explorers? Key press to painted picture, in a real JupyterLab.

    python tests/bench_explorers.py [name ...]

For each control of each explorer, in milliseconds: the kernel's own part (compute, draw, PNG) as time passed and as
processor time; then from a key press to the first frame that shows the new picture, median and 90th percentile; the
number of frames without a picture and of changes of height;
and the tail: how long pictures keep coming after a second of rapid key presses. A control that changes limits,
ticks or titles has the whole figure drawn (kind "axes"); all others only what moves (kind "moves").
Other work on the machine shows in all of these, most of all in the 90th percentile.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import nbformat
from conftest import find_chromium
from lab import browser_page, close_notebook, jupyter_lab, new_notebook, open_notebook, run_all, time_limit

from minimind_core import explorers
from minimind_core.explorers.shell import Choice, Explorer, Slider, Text

TARGETS = {"moves": (45, 60), "axes": (110, 140)}  # ms at the median and at the 90th percentile
PRESSES, WARM_UP, PAUSE = 24, 4, 160  # key presses, of which not counted; ms between two
HELD, REPEAT = 36, 28  # keys of a burst, ms between them

WATCH = """root => {
    const output = root.closest(".jp-OutputArea"), source = root.querySelector("img").src;
    const watch = { from: null, took: [], blank: 0, heights: new Set(), last: source, lastPaint: 0, held: 0 };
    window.watch = watch;
    document.addEventListener("keydown", () => {
        watch.held = performance.now();
        watch.from ??= watch.held;
    }, true);
    const frame = () => {
        if (window.watch !== watch) return;
        const picture = root.querySelector("img");
        watch.heights.add(Math.round(output.getBoundingClientRect().height));
        if (picture.naturalWidth === 0) watch.blank++;
        else if (picture.complete && picture.src !== watch.last) {
            watch.last = picture.src;
            watch.lastPaint = performance.now();
            if (watch.from !== null) watch.took.push(watch.lastPaint - watch.from);
            watch.from = null;
        }
        requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
}"""
RESULT = (
    "() => ({...window.watch, heights: [...window.watch.heights], tail: window.watch.lastPaint - window.watch.held})"
)


def percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(len(times) - 1, int(part * len(times)))]


def moves(control) -> list[tuple[object, str, str]]:
    """The steps from the default to a neighbor: its value, the key that leads there, the key that leads back."""
    if isinstance(control, Slider):
        index, last = control.nearest(control.default), len(control.grid) - 1
        right = [(control.grid[index + 1], "ArrowRight", "ArrowLeft")] if index < last else []
        return right + ([(control.grid[index - 1], "ArrowLeft", "ArrowRight")] if index else [])
    if isinstance(control, Choice):
        index, last = control.options.index(control.default), len(control.options) - 1
        down = [(control.options[index + 1], "ArrowDown", "ArrowUp")] if index < last else []
        return down + ([(control.options[index - 1], "ArrowUp", "ArrowDown")] if index else [])
    if isinstance(control, Text):
        return [(control.default[:-1], "Backspace", control.default[-1])]
    return [(not control.default, "Space", "Space")]


def visible_move(explorer: Explorer, key: str) -> tuple[object, str, str] | None:
    """The first step that changes the picture, if there is one."""
    explorer.reset()
    for move in moves(explorer.controls[key]):
        before = explorer.png
        explorer.set(**{key: move[0]})
        changed = explorer.png != before
        explorer.reset()
        if changed:
            return move
    return None


def kernel_part(explorer: Explorer, key: str, near) -> tuple[str, float, float]:
    """Kind of the control, and for one step the median milliseconds that pass and that the processor works."""
    passed, worked, draws = [], [], []
    draw = explorer.canvas.draw
    explorer.canvas.draw = lambda: (draws.append(1), draw())
    for value in [near, explorer.controls[key].default] * (PRESSES // 2):
        start, busy = time.perf_counter(), time.process_time()
        explorer.set(**{key: value})
        passed.append((time.perf_counter() - start) * 1000)
        worked.append((time.process_time() - busy) * 1000)
    explorer.canvas.draw = draw
    return ("axes" if len(draws) > PRESSES // 3 else "moves"), median(passed), median(worked)


def browser_part(page, root, key: str, control, there_and_back: tuple[str, str]) -> dict:
    """Press the two keys in turns, slowly, then rapidly; returns what WATCH saw."""
    root.query_selector(f"[data-name={key}] :is(input, select)").focus()
    if isinstance(control, Text):
        page.keyboard.press("End")
    root.evaluate(WATCH)
    for press in range(PRESSES):
        page.keyboard.press(there_and_back[press % 2])
        page.wait_for_timeout(PAUSE)
    page.wait_for_timeout(500)
    seen = page.evaluate(RESULT)
    root.evaluate(WATCH)
    for press in range(HELD):
        page.keyboard.press(there_and_back[press % 2])  # in turns, so that no end is reached
        page.wait_for_timeout(REPEAT)
    page.wait_for_timeout(1500)
    burst = page.evaluate(RESULT)
    page.evaluate("() => { window.watch = null; }")
    return {
        "took": seen["took"][WARM_UP:],
        "blank": seen["blank"] + burst["blank"],
        "jumps": len(set(seen["heights"] + burst["heights"])) - 1,
        "tail": max(burst["tail"], 0.0),
    }


def main() -> None:
    names = sys.argv[1:] or explorers.names()
    chromium = find_chromium()
    print(
        f"{'explorer':12} {'control':18} {'kind':6} kernel   cpu {'p50':>6} {'p90':>6} {'tail':>6} blank jumps  target"
    )
    with tempfile.TemporaryDirectory() as folder:
        notebooks = [Path(folder) / f"{name}.ipynb" for name in names]
        for name, path in zip(names, notebooks, strict=True):
            nbformat.write(new_notebook(f"from minimind_core.explorers import {name}\n{name}.explore()"), path)
        with jupyter_lab(notebooks) as lab, browser_page(chromium) as page:
            for name in names:
                with time_limit(300):
                    bench(page, lab, name)


def bench(page, lab, name: str) -> None:
    explorer = explorers.module(name).explore()
    open_notebook(page, lab, f"{name}.ipynb")
    run_all(page)
    page.wait_for_selector(".mm-explorer img")
    root = page.query_selector(".mm-explorer")
    page.wait_for_timeout(1500)
    everything = {"moves": [], "axes": []}
    for key, control in explorer.controls.items():
        move = visible_move(explorer, key)
        if move is None:
            print(f"{name:12} {key:18} changes nothing beside the defaults", flush=True)
            continue
        near, *there_and_back = move
        kind, passed, worked = kernel_part(explorer, key, near)
        seen = browser_part(page, root, key, control, there_and_back)
        everything[kind] += seen["took"]
        p50, p90 = percentile(seen["took"], 0.5), percentile(seen["took"], 0.9)
        line = f"{name:12} {key:18} {kind:6} {passed:6.1f} {worked:5.1f} {p50:6.0f} {p90:6.0f} {seen['tail']:6.0f}"
        print(f"{line} {seen['blank']:5} {seen['jumps']:5}", flush=True)
    for kind, times in everything.items():
        if times:
            p50, p90 = percentile(times, 0.5), percentile(times, 0.9)
            goal = TARGETS[kind]
            verdict = "OK" if p50 <= goal[0] and p90 <= goal[1] else "MISS"
            line = f"{name:12} {'all':18} {kind:6} {'':12} {p50:6.0f} {p90:6.0f} {'':6} {'':5} {'':5}"
            print(f"{line}  {goal[0]} / {goal[1]} {verdict}", flush=True)
    close_notebook(page)


if __name__ == "__main__":
    main()
