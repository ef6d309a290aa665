"""Every notebook in a real JupyterLab, every explorer moved by the keyboard alone.

Needs Chromium or Chrome. Where there is none these tests are skipped; with CI=true they fail instead.
"""

from pathlib import Path

import nbformat
import pytest
from conftest import find_chromium
from lab import (
    ROOT,
    browser_page,
    close_notebook,
    error_outputs,
    jupyter_lab,
    new_notebook,
    open_notebook,
    run_all,
    time_limit,
)

from minimind_core import explorers

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LIMIT = 240  # seconds for one notebook, everything included
ANSWER = 10_000  # ms for one change of a control

BROKEN = """\
from minimind_core.explorers.shell import Explorer, Result, Slider, Toggle

def compute(x, wide):
    if x == 7:
        raise ArithmeticError('no <b>seven</b> & "here"')
    words = "and a long sentence goes on and on, " * (4 if wide else 1)
    return Result({"x": x}, f'x is {x} <i>&amp;</i> "quoted", {words}')

def draw(figure):
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    return {"point": axes.plot([], [], "o")}

def update(scene, result):
    scene["point"][0].set_data([result.numbers["x"]], [result.numbers["x"]])

controls = {"x": Slider("x", range(0, 11), 5), "wide": Toggle("long sentence", False)}
Explorer("broken", controls=controls, compute=compute, draw=draw, update=update)"""

WORKING = (
    BROKEN.partition("def compute")[0]
    + """\
import time

def work(x):
    for i in range(1, 101):
        if x != 5:
            time.sleep(0.04)
        yield i / 100, Result({"x": x * i / 100}, f"{i} of 100 slices with x = {x}")

def draw(figure):
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0, 10))
    return {"point": axes.plot([], [], "o")}

def update(scene, result):
    scene["point"][0].set_data([result.numbers["x"]], [result.numbers["x"]])

Explorer("working", controls={"x": Slider("x", range(0, 11), 5)}, work=work, draw=draw, update=update)"""
)

STATE = """root => {
    const box = node => { const r = node.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; };
    const [x, y] = box(root), picture = root.querySelector("img"), [px, py, pw, ph] = box(picture);
    const round = numbers => numbers.map(n => Math.round(n * 10) / 10);
    return {
        serial: root.dataset.serial,
        place: round([px - x, py - y, pw, ph, ...box(root.closest(".jp-OutputArea")).slice(2)]),
        alt: picture.alt,
        loaded: picture.complete && picture.naturalWidth > 0,
        sentence: root.querySelector(".mm-sentence").textContent,
        error: root.querySelector("[role=alert]").hidden ? "" : root.querySelector("[role=alert]").textContent,
        remark: root.querySelector("[role=status]").textContent,
    };
}"""

FOCUSED = """root => {
    const node = document.activeElement;
    if (!root.contains(node)) return null;
    return {
        kind: node.type, value: node.value, checked: node.checked, text: node.textContent, index: node.selectedIndex,
        last: node.max, row: node.closest("[data-name]")?.dataset.name,
        name: node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.textContent,
        spoken: node.getAttribute("aria-valuetext"),
    };
}"""

PIXELS = """async root => {
    const bytes = new Uint8Array(await (await fetch(root.querySelector("img").src)).arrayBuffer());
    return bytes.reduce((sum, byte) => (sum * 31 + byte) % 2147483647, bytes.length);
}"""


class Driver:
    """One explorer on the page, driven by keys. After each: nothing moved, nothing failed, the alt text fits."""

    def __init__(self, page, root):
        self.page, self.root, self.keys = page, root, page.keyboard
        page.wait_for_function("root => root.querySelector('img').naturalWidth > 0", arg=root, timeout=ANSWER)
        self.place = self.state()["place"]

    def state(self) -> dict:
        return self.root.evaluate(STATE)

    def focused(self) -> dict | None:
        return self.root.evaluate(FOCUSED)

    def pixels(self) -> int:
        return self.root.evaluate(PIXELS)

    def press(self, *keys: str, failing: bool = False) -> dict:
        """Press keys, wait for the answer of the kernel, check the page, and return its state."""
        old = self.state()["serial"]
        for key in keys:
            self.keys.press(key)
        self.page.wait_for_function(
            "([root, old]) => root.dataset.serial !== old", arg=[self.root, old], timeout=ANSWER
        )
        return self.settled(*keys, failing=failing)

    def settled(self, *keys: str, failing: bool = False) -> dict:
        """Wait until nothing is under way, check the page, and return its state. keys: what was pressed."""
        self.page.wait_for_function(
            "root => !('busy' in root.dataset) && root.dataset.done === '1' && root.querySelector('img').complete",
            arg=self.root,
            timeout=ANSWER,
        )
        state = self.state()
        assert state["place"] == self.place, f"the picture or the output moved after {keys}"
        assert state["alt"] == state["sentence"] != "", f"alt text is not the sentence after {keys}"
        assert state["loaded"], f"no picture after {keys}"
        assert bool(state["error"]) == failing, f"after {keys}: {state['error'] or 'no error shown'}"
        return state

    def type(self, text: str) -> dict:
        self.keys.press("Control+a")
        self.keys.type(text)
        return self.press("Enter")

    def seen(self) -> tuple:
        return self.pixels(), self.state()["sentence"]


def drive(page, root) -> None:
    """Go through the explorer with Tab, move every control and press every button."""
    driver = Driver(page, root)
    root.query_selector("button").focus()
    start, moved = driver.seen(), []
    while (now := driver.focused()) is not None:
        assert now["name"].strip(), f"a control without a name: {now}"
        before = driver.seen()
        if now["kind"] == "submit" or now["kind"] == "button":
            driver.press("Enter")
            if now["text"] == "Reset":
                assert driver.seen() == start, "Reset does not bring the first picture back"
        elif now["kind"] == "range":
            drive_slider(driver, now, before)
        elif now["kind"] == "select-one":
            driver.press("ArrowDown" if now["index"] == 0 else "ArrowUp")
            assert driver.seen() != before, f"{now['row']}: another option changes nothing"
            driver.press("ArrowUp" if now["index"] == 0 else "ArrowDown")
        elif now["kind"] == "checkbox":
            driver.press("Space")
            assert driver.seen() != before, f"{now['row']}: the check box changes nothing"
            driver.press("Space")
        else:
            assert now["kind"] == "text", f"an unknown control: {now}"
            drive_text(driver, now, before)
        assert driver.seen() == before or now["kind"] == "button", f"{now['row']} does not come back to where it was"
        moved.append(now["row"] or now["text"])
        page.keyboard.press("Tab")
    rows = root.evaluate("root => [...root.querySelectorAll('[data-name]')].map(row => row.dataset.name)")
    assert set(rows) <= set(moved), f"not reached by Tab: {set(rows) - set(moved)}"


def drive_slider(driver: Driver, now: dict, before: tuple) -> None:
    """Move a slider by arrow, Home and End; then its number box, which takes it back to where it was."""
    row, index, last = now["row"], int(now["value"]), int(now["last"])
    assert now["spoken"] not in (None, ""), f"{row}: the slider's value can't be read out"
    seen = set()
    moves = ["ArrowLeft", "ArrowRight", "Home", "End"] if index == last else ["ArrowRight", "ArrowLeft", "End", "Home"]
    for key in moves:
        driver.press(key)
        seen.add(driver.seen())
        wanted = {"Home": 0, "End": last, moves[0]: index + (1 if moves[0] == "ArrowRight" else -1), moves[1]: index}[
            key
        ]
        assert int(driver.focused()["value"]) == wanted, f"{row}: {key} does not move the slider as it should"
    assert len(seen | {before}) >= min(3, last + 1), f"{row}: picture and sentence hardly change"
    driver.keys.press("Tab")
    box = driver.focused()
    assert box["kind"] == "text" and box["row"] == row, f"{row}: no number box after the slider"
    state = driver.type("1e12")
    assert "outside" in state["remark"], f"{row}: clipping is not said"
    state = driver.type("many")
    assert "not a number" in state["remark"], f"{row}: a word is taken for a number"
    driver.type(now["spoken"].split()[0])
    assert driver.state()["remark"] == "", f"{row}: the remark stays"


def drive_text(driver: Driver, now: dict, before: tuple) -> None:
    """Write another text, too long a text and nothing; then the text that stood there."""
    driver.keys.press("Control+a")
    driver.press(*"abcabc")
    assert driver.seen() != before, f"{now['row']}: another text changes nothing"
    driver.keys.insert_text("a" * 500)
    assert "are used" in driver.settled()["remark"], f"{now['row']}: cutting is not said"
    state = driver.press("Control+a", "Delete")
    assert "nothing is written" in state["remark"], f"{now['row']}: an empty text is not refused"
    driver.keys.insert_text(now["value"])
    driver.settled()


@pytest.fixture(scope="module")
def chromium() -> str:
    return find_chromium()


@pytest.fixture(scope="module")
def lab(chromium, tmp_path_factory):
    broken = tmp_path_factory.mktemp("browser") / "broken.ipynb"
    notebook = new_notebook(BROKEN)
    nbformat.write(notebook, broken)
    explorer = explorers.module("rmsnorm").explore()
    data, metadata = explorer._repr_mimebundle_()
    output = {"output_type": "execute_result", "data": data, "metadata": metadata, "execution_count": 1}
    notebook.cells[0] |= {"outputs": [nbformat.from_dict(output)], "execution_count": 1}
    stored = broken.with_name("stored.ipynb")
    nbformat.write(notebook, stored)
    working = broken.with_name("working.ipynb")
    nbformat.write(new_notebook(WORKING), working)
    with jupyter_lab([*NOTEBOOKS, broken, working, stored]) as running:
        yield running


@pytest.fixture
def page(chromium):
    with time_limit(LIMIT), browser_page(chromium) as page:
        yield page


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(lab, page, notebook: Path):
    open_notebook(page, lab, notebook.name)
    run_all(page)
    try:
        assert error_outputs(page) == []
        shown = page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets.map(c => c.model)
                .filter(m => m.type === "code").flatMap(m => m.outputs.toJSON())
                .filter(o => o.data?.["text/plain"]?.toString().startsWith("<Explorer")).length"""
        )
        page.wait_for_function(
            "n => document.querySelectorAll('.mm-explorer img').length === n", arg=shown, timeout=ANSWER
        )
        for root in page.query_selector_all(".mm-explorer"):
            drive(page, root)
        assert error_outputs(page) == []
        assert "Error displaying widget" not in page.inner_text(".jp-Notebook")
        assert page.problems == []
    finally:
        close_notebook(page)


def test_error_is_shown_in_place(lab, page):
    open_notebook(page, lab, "broken.ipynb")
    run_all(page)
    page.wait_for_selector(".mm-explorer img", timeout=ANSWER)
    driver = Driver(page, page.query_selector(".mm-explorer"))
    driver.root.query_selector("input").focus()
    driver.press("ArrowRight")
    state = driver.press("ArrowRight", failing=True)
    assert state["error"] == 'ArithmeticError: no <b>seven</b> & "here"'
    state = driver.press("ArrowRight")
    assert state["alt"].startswith('x is 8 <i>&amp;</i> "quoted"')
    for _ in range(2):
        page.keyboard.press("Tab")
    assert len(driver.press("Space")["sentence"]) > 150  # a longer sentence moves nothing
    close_notebook(page)


def test_held_key_leaves_no_queue(lab, page):
    """While one change is under way the next ones wait in the browser, and only the newest is sent."""
    open_notebook(page, lab, "broken.ipynb")
    run_all(page)
    page.wait_for_selector(".mm-explorer img", timeout=ANSWER)
    driver = Driver(page, page.query_selector(".mm-explorer"))
    driver.root.query_selector("input").focus()
    first = int(driver.state()["serial"])
    page.evaluate(
        """() => { const slider = document.activeElement;
            for (let i = 0; i < 200; i++) {
                slider.value = 1 + (i % 5);
                slider.dispatchEvent(new Event("input"));
            }
            slider.value = 9;
            slider.dispatchEvent(new Event("input")); }"""
    )
    page.wait_for_function(
        "root => root.querySelector('img').alt.startsWith('x is 9')", arg=driver.root, timeout=ANSWER
    )
    page.wait_for_timeout(500)
    assert int(driver.state()["serial"]) - first == 2, "201 changes at once should give two pictures"
    close_notebook(page)


def test_escape_leads_back_to_the_notebook(lab, page):
    open_notebook(page, lab, "broken.ipynb")
    run_all(page)
    page.wait_for_selector(".mm-explorer img", timeout=ANSWER)
    page.focus(".mm-explorer input")
    page.keyboard.press("Escape")
    assert page.evaluate("() => !document.activeElement.closest('.mm-explorer')")
    page.keyboard.press("b")  # JupyterLab's command mode: a new cell below
    page.wait_for_function("() => window.jupyterapp.shell.currentWidget.content.widgets.length === 2", timeout=ANSWER)
    page.keyboard.press("z")
    close_notebook(page)


def test_after_a_restart_the_reader_is_told(lab, page):
    open_notebook(page, lab, "broken.ipynb")
    run_all(page)
    page.wait_for_selector(".mm-explorer img", timeout=ANSWER)
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.focus(".mm-explorer input")
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "() => document.querySelector('.mm-explorer [role=status]').textContent.includes('run this cell again')",
        timeout=ANSWER,
    )
    close_notebook(page)
    assert page.problems == []


def test_stop_is_heard_while_work_goes_on(lab, page):
    open_notebook(page, lab, "working.ipynb")
    run_all(page)
    page.wait_for_selector(".mm-explorer img", timeout=ANSWER)
    driver = Driver(page, page.query_selector(".mm-explorer"))
    button = driver.root.query_selector(".mm-work button")
    driver.root.query_selector("input").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("root => root.dataset.done > 0.1 && root.dataset.done < 1", arg=driver.root, timeout=ANSWER)
    assert button.inner_text() == "Stop"
    button.focus()
    pressed = page.evaluate("() => performance.now()")
    page.keyboard.press("Enter")
    state = driver.settled()
    assert page.evaluate("() => performance.now()") - pressed < 1000, "five seconds of work were not stopped"
    assert state["remark"].startswith("Stopped at ") and not state["sentence"].startswith("100 of 100")
    assert button.inner_text() == "Run again"
    page.keyboard.press("Enter")
    page.wait_for_function("root => root.dataset.done < 1", arg=driver.root, timeout=ANSWER)
    assert driver.settled()["sentence"] == "100 of 100 slices with x = 6"
    close_notebook(page)


def test_stored_notebook_shows_the_picture(lab, page):
    """Before anything is run, the stored output is the still picture."""
    open_notebook(page, lab, "stored.ipynb")
    picture = page.wait_for_selector(".jp-OutputArea img", timeout=ANSWER)
    assert picture.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") > 700
    assert page.query_selector(".mm-explorer") is None
    close_notebook(page)
