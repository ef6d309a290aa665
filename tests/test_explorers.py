"""Every explorer, over its whole control grid, without a browser; and the shell that they share."""

import asyncio
import importlib.util
import io
import itertools
import json
import math
import random
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text as DrawnText
from PIL import Image

from minimind_core import explorers
from minimind_core.explorers import style
from minimind_core.explorers.canvas import Canvas
from minimind_core.explorers.shell import (
    Choice,
    Explorer,
    Result,
    Slider,
    Text,
    Toggle,
    linear,
    log,
    powers,
)

ROOT = Path(__file__).resolve().parents[1]
NAMES = explorers.names()
COMPUTED, PAINTED, MEASURED = 600, 24, 10  # states of one explorer that are computed, drawn, checked for clipped text
COSTLY = {"sampling": 150}  # computed states where each of them runs the model many times
LONGEST = 300  # characters that the sentence's three lines hold


def states(explorer: Explorer, count: int) -> list[dict]:
    """Up to `count` states: each control at its ends, middle and default, times all others; a fixed sample if too many.

    The default state, and each control moved alone, are always among them.
    """
    samples = {key: control.samples() for key, control in explorer.controls.items()}
    start = dict(explorer.values)
    alone = [start] + [start | {key: value} for key in samples for value in samples[key]]
    everything = [dict(zip(samples, values, strict=True)) for values in itertools.product(*samples.values())]
    if len(everything) > count:
        everything = random.Random(0).sample(everything, max(count - len(alone), count // 2))
    return alone + everything


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def all_numbers(numbers: dict) -> np.ndarray:
    return np.concatenate([np.asarray(value, dtype=float).ravel() for value in numbers.values()])


@pytest.fixture(autouse=True)
def strict():
    """No warning and no figure of pyplot may be left behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert plt.get_fignums() == []


@pytest.fixture(params=NAMES)
def explorer(request) -> Explorer:
    return explorers.module(request.param).explore()


# --- every explorer


def test_there_are_explorers():
    assert "rmsnorm" in NAMES


def test_grid(explorer):
    seen = set()
    for state in states(explorer, COSTLY.get(explorer.name, COMPUTED)):
        result = explorer.compute(**state)
        assert np.isfinite(all_numbers(result.numbers)).all(), f"a number that is not finite at {state}"
        assert 20 <= len(result.sentence) <= LONGEST, f"{len(result.sentence)} characters at {state}: {result.sentence}"
        assert not any(word in result.sentence for word in ("nan", "inf ", "-0.00 ", "None", "tensor(")), (
            result.sentence
        )
        seen.add(result.sentence)
    assert len(seen) > len(explorer.controls), "the sentence hardly depends on the data"


def test_compute_is_pure(explorer):
    for state in states(explorer, 10)[:10]:
        one, two = explorer.compute(**state), explorer.compute(**state)
        assert one.sentence == two.sentence
        np.testing.assert_array_equal(all_numbers(one.numbers), all_numbers(two.numbers))


def test_moved_picture_equals_a_fresh_one(explorer):
    """After any walk through the controls the picture is the one that a new explorer of this state draws."""
    name = explorer.name
    walk = random.Random(1).sample(states(explorer, COMPUTED), PAINTED)
    shape = pixels(explorer.png).shape
    for step, state in enumerate(walk):
        explorer.set(**state)
        assert pixels(explorer.png).shape == shape
        assert explorer.shown["sentence"] == explorer.sentence
        if step % 6 == 5:
            fresh = explorers.module(name).explore(**state)
            difference = (pixels(explorer.png) != pixels(fresh.png)).any(axis=-1)
            assert not difference.any(), f"{difference.sum()} pixels depend on the states before {state}"


def test_each_control_moves_the_picture(explorer):
    """For every control there is a state in which it changes the picture: the default or a preset."""
    for key, control in explorer.controls.items():
        assert any(moves(explorer, preset, key, control) for preset in (None, *explorer.presets)), (
            f"{key} changes nothing, neither from the defaults nor from a preset"
        )


def moves(explorer: Explorer, preset: str | None, key: str, control) -> bool:
    explorer.reset()
    if preset:
        explorer.choose(preset)
    before = explorer.png
    for value in (control.samples()[-1], control.samples()[0]):
        explorer.set(**{key: value})
        if explorer.png != before:
            return True
    return False


def test_presets_and_reset(explorer):
    first = (dict(explorer.values), explorer.png, explorer.sentence)
    assert len(explorer.presets) >= 2
    for preset, values in explorer.presets.items():
        explorer.set(**{key: control.samples()[-1] for key, control in explorer.controls.items()})
        explorer.choose(preset)
        assert values.items() <= explorer.values.items()
        assert preset in explorer.shown["preset"]
    explorer.reset()
    assert (explorer.values, explorer.png, explorer.sentence) == first


def test_text_is_inside_and_apart(explorer):
    """No label leaves the picture, and no two texts lie on each other."""
    for state in random.Random(2).sample(states(explorer, COMPUTED), MEASURED) + list(explorer.presets.values()):
        explorer.set(**state)
        with style.applied():  # the ticks that matplotlib picks depend on the font size
            texts, ticks = text_boxes(explorer)
        whole = explorer.figure.bbox.padded(1.5)
        for words, box in texts + ticks:
            inside = whole.x0 <= box.x0 and whole.y0 <= box.y0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
            assert inside, f"{words!r} leaves the picture at {state}: {box}"
        for (one, a), (two, b) in itertools.combinations(texts, 2):
            wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            shared = max(wide, 0) * max(high, 0) / min(a.width * a.height, b.width * b.height)
            assert shared < 0.12, f"{one!r} and {two!r} overlap by {shared:.0%} at {state}"


def text_boxes(explorer: Explorer) -> tuple[list, list]:
    """(words, bounding box) of all visible texts, and of all rows of tick labels."""
    figure, renderer = explorer.figure, explorer.canvas.get_renderer()
    axes = [one for one in figure.axes if one.get_visible()]
    axis = [side for one in axes for side in (one.xaxis, one.yaxis)]
    texts = [child for one in [figure, *axes] for child in one.get_children() if isinstance(child, DrawnText)]
    texts += [side.label for side in axis]
    texts += [text for one in axes if one.get_legend() for text in one.get_legend().get_texts()]
    rows = [(f"tick labels of {one.axes.get_title(loc='left')!r}", one.get_tightbbox(renderer)) for one in axis]
    return (
        [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_visible() and t.get_text().strip()],
        [row for row in rows if row[1] is not None],
    )


def test_mime_bundle(explorer):
    data, _ = explorer._repr_mimebundle_()
    assert sorted(data) == ["application/vnd.jupyter.widget-view+json", "image/png", "text/plain"]
    assert data["text/plain"] == repr(explorer) == f"<Explorer {explorer.name}: {explorer.sentence}>"


def test_an_error_in_a_callback_is_seen(explorer, monkeypatch):
    def broken(**values):
        raise ZeroDivisionError("planted")

    good, picture = explorer.compute, explorer.png
    monkeypatch.setattr(explorer, "compute", broken)
    with pytest.raises(ZeroDivisionError, match="planted"):
        explorer._handle_custom_msg({"reset": True}, [])
    assert explorer.shown["error"] == explorer.error == "ZeroDivisionError: planted"
    assert "planted" in repr(explorer)
    assert explorer.png == picture
    monkeypatch.setattr(explorer, "compute", good)
    explorer.reset()
    assert explorer.shown["error"] == explorer.error == ""


def test_figures_show_the_numbers_of_today():
    spec = importlib.util.spec_from_file_location("build", ROOT / "figures" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    names = set()
    for name, explorer in build.pictures():
        path = ROOT / "figures" / name
        assert path.exists(), f"{name} is missing: run `make figures`"
        with Image.open(path) as picture:
            stored = dict(picture.info)
        assert stored["Description"] == explorer.sentence, f"{name} is out of date: run `make figures`"
        wanted, drawn = build.plain(explorer.result.numbers), json.loads(stored["Numbers"])
        assert wanted.keys() == drawn.keys(), f"{name} is out of date: run `make figures`"
        for key, values in wanted.items():
            np.testing.assert_allclose(drawn[key], values, rtol=1e-3, atol=1e-5, err_msg=f"{name}: {key}")
        names.add(name)
    assert {path.name for path in (ROOT / "figures").glob("explorer_*.png")} == names
    with Image.open(ROOT / "figures" / "map.png") as picture:
        assert picture.info["Description"] == build.model_map.ALT, "map.png is out of date: run `make figures`"


# --- the shell


def small(compute=None, **options) -> Explorer:
    """An explorer of one point, for tests of the shell itself."""

    def draw(figure):
        axes = figure.subplots()
        axes.set(xlim=(0, 10), ylim=(0, 100))
        return {"point": axes.plot([], [], "o"), "axes": axes}

    def update(scene, result):
        scene["point"][0].set_data([result.numbers["x"]], [result.numbers["x"] ** 2])
        style.limits(scene["axes"], y=(0, result.numbers["top"]))

    def square(x, eps, name, wide):
        return Result({"x": x, "top": 200 if wide else 100}, f'{x} squared is {x**2} <with> & "quotes".')

    controls = {
        "x": Slider("x", range(0, 11), 3),
        "eps": Slider("eps", log(1e-8, 1e-2), 1e-6),
        "name": Choice("name", ("a", "b"), "a"),
        "wide": Toggle("wide", False),
    }
    if "work" not in options:
        options["compute"] = compute or square
    return Explorer("small", controls=controls, draw=draw, update=update, **options)


def test_grids():
    assert linear(0, 1, 0.25) == [0, 0.25, 0.5, 0.75, 1]
    assert linear(0, 0.3, 0.1) == [0, 0.1, 0.2, 0.3]
    assert log(1e-8, 1e-2, 1) == [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    assert 1e-6 in log(1e-8, 1e-2)
    assert powers(4, 64) == [4, 8, 16, 32, 64]


def test_slider_finds_the_nearest_position():
    slider = Slider("x", [1, 2, 4, 8], 1)
    assert [slider.nearest(value) for value in (0, 1, 1.4, 3.5, 8, 99)] == [0, 0, 0, 2, 3, 3]


@pytest.mark.parametrize(
    ("typed", "value", "remark"),
    [
        ("7", 7, ""),
        (" 7 ", 7, ""),
        ("70", 10, "x: 70 is outside 0 to 10; 10 is used."),
        ("-1", 0, "x: -1 is outside 0 to 10; 0 is used."),
        ("2.7", 3, "x: 2.7 is not a whole number; 3 is used."),
        ("seven", 3, "x: 'seven' is not a number; 3 is kept."),
        ("nan", 3, "x: 'nan' is not a number; 3 is kept."),
        ("", 3, "x: '' is not a number; 3 is kept."),
    ],
)
def test_typed_numbers_are_clipped_and_it_is_said(typed, value, remark):
    explorer = small()
    explorer._handle_custom_msg({"set": {"x": typed}}, [])
    assert (explorer.values["x"], explorer.shown["remark"]) == (value, remark)
    assert isinstance(explorer.values["x"], int)
    assert explorer.shown["controls"]["x"] == {"index": value, "text": str(value), "spoken": str(value)}


def test_decimal_comma_and_values_between_positions():
    explorer = small()
    explorer._handle_custom_msg({"set": {"eps": "0,0000033"}}, [])
    assert math.isclose(explorer.values["eps"], 3.3e-6)
    assert explorer.remark == ""


def test_snap():
    slider = Slider("head_dim", range(4, 257, 2), 96, snap=True)
    assert slider.read("97", 96) == (98, "head_dim: 97 is between two positions; 98 is used.")
    with pytest.raises(ValueError, match="only the slider's own positions"):
        slider.check(97)


def test_text():
    text = Text("text", "the cat", 8)
    assert text.read("a dog", "the cat") == ("a dog", "")
    assert text.read("a dog and", "the cat") == ("a dog an", "text: 9 characters; the first 8 are used.")
    assert text.read("", "the cat") == ("the cat", "text: nothing is written; the text before is kept.")
    for wrong, said in (("", "got 0 characters"), ("a dog and", "got 9 characters"), (3, "got 3")):
        with pytest.raises(ValueError, match=f"text must be a text of 1 to 8 characters; {said}"):
            text.check(wrong)
    assert all(text.check(sample) for sample in text.samples())


def test_all_messages_of_the_browser():
    explorer = small(presets={"five": {"x": 5}})
    explorer._handle_custom_msg({"set": {"x": 9, "name": 1, "wide": True}}, [])
    assert explorer.values == {"x": 9, "eps": 1e-6, "name": "b", "wide": True}
    explorer._handle_custom_msg({"preset": "five", "set": {}}, [])
    assert explorer.values == {"x": 5, "eps": 1e-6, "name": "b", "wide": True}
    explorer._handle_custom_msg({"reset": True, "set": {"x": 1}}, [])
    assert explorer.values == {"x": 1, "eps": 1e-6, "name": "a", "wide": False}


def test_python_mistakes_raise():
    explorer = small(presets={"five": {"x": 5}})
    with pytest.raises(ValueError, match=r"x must be between 0 and 10, whole numbers; got 11"):
        explorer.set(x=11)
    with pytest.raises(TypeError, match="no control named 'y'; the controls are x, eps, name, wide"):
        explorer.set(y=1)
    with pytest.raises(ValueError, match="name must be one of a, b; got 'c'"):
        explorer.set(name="c")
    with pytest.raises(ValueError, match="no preset 'six'; choose one of five"):
        explorer.choose("six")
    with pytest.raises(TypeError, match="preset 'bad'"):
        small(presets={"bad": {"y": 1}})
    with pytest.raises(ValueError, match="x must be between"):
        small(start={"x": 99})


def test_an_error_goes_away_after_a_good_value():
    def compute(x, **others):
        if x == 7:
            raise ArithmeticError("no seven here")
        return Result({"x": x, "top": 100}, f"x is {x}.")

    explorer = small(compute)
    with pytest.raises(ArithmeticError, match="no seven here"):
        explorer.set(x=7)
    assert explorer.shown["error"] == "ArithmeticError: no seven here"
    assert explorer.shown["controls"]["x"]["index"] == 7
    explorer.set(x=8)
    assert (explorer.shown["error"], explorer.sentence) == ("", "x is 8.")


def test_only_a_change_of_what_stands_still_draws_everything(monkeypatch):
    explorer, draws = small(), []
    full = explorer.canvas.draw
    monkeypatch.setattr(explorer.canvas, "draw", lambda: (draws.append(1), full()))
    explorer.set(x=4)
    explorer.set(x=5)
    assert len(draws) == 0
    explorer.set(wide=True)
    assert len(draws) == 1


def counting(x, eps, name, wide):
    """Work of ten slices; the fifth fails where x is 7."""
    for i in range(1, 11):
        if x == 7 and i == 5:
            raise ArithmeticError("no seven here")
        yield i / 10, Result({"x": x * i / 10, "top": 100}, f"{i} of 10 slices with x = {x}.")


def test_work_gives_its_last_result_in_python():
    explorer = small(work=counting)
    assert explorer.sentence == "10 of 10 slices with x = 3." and explorer.shown["done"] == 1.0
    explorer.set(x=5)
    assert explorer.sentence == "10 of 10 slices with x = 5." and explorer.spec["works"]
    assert explorer.compute(**explorer.values).numbers["x"] == 5
    assert not small().spec["works"] and small().shown["done"] == 1.0


def test_work_listens_between_two_slices():
    explorer, seen = small(work=counting), []
    explorer.observe(lambda change: seen.append((change.new["done"], change.new["sentence"][:9])), "shown")

    async def until(done: float) -> None:
        while explorer.shown["done"] < done:
            await asyncio.sleep(0.001)

    async def browser():
        explorer._handle_custom_msg({"set": {"x": 4}}, [])
        await asyncio.sleep(0.001)
        await until(1.0)
        assert [done for done, _ in seen] == [i / 10 for i in range(1, 11)]
        explorer._handle_custom_msg({"set": {"x": 5}}, [])
        await asyncio.sleep(0.001)
        await until(0.3)
        explorer._handle_custom_msg({"set": {"eps": "1e-5"}}, [])  # another control: the work begins anew
        await asyncio.sleep(0.001)
        assert explorer.values["x"] == 5 and explorer.shown["done"] < 0.3
        await until(0.3)
        explorer._handle_custom_msg({"stop": True}, [])
        assert explorer.shown["remark"].startswith("Stopped at ") and explorer.shown["done"] == 1.0
        count, picture = len(seen), explorer.png
        await asyncio.sleep(0.05)
        assert len(seen) == count and explorer.png is picture and explorer.sentence != "10 of 10 slices with x = 5."
        explorer._handle_custom_msg({"stop": True}, [])  # nothing to stop: nothing is said
        assert explorer.shown["done"] == 1.0
        explorer._handle_custom_msg({"set": {}}, [])  # again
        await asyncio.sleep(0.001)
        await until(1.0)
        assert explorer.sentence == "10 of 10 slices with x = 5." and explorer.remark == ""

    asyncio.run(browser())


def test_messages_from_two_threads_do_not_mix():
    """JupyterLab hands a message to another thread of the kernel while the main one is busy."""

    explorer, pictures, wrong = small(), {}, []
    for x in (1, 4, 6, 9):
        explorer.set(x=x)
        pictures[explorer.shown["sentence"]] = explorer.shown["picture"]
    update = explorer.update
    explorer.update = lambda scene, result: (update(scene, result), time.sleep(0.002))

    def press(positions):
        for x in positions:
            explorer._handle_custom_msg({"set": {"x": x}}, [])
            wrong.append(pictures[explorer.shown["sentence"]] != explorer.shown["picture"])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(press, [1, 9] * 10), pool.submit(press, [4, 6] * 10)]:
            done.result()
    assert not any(wrong)


def test_work_that_fails_says_so_and_ends():
    explorer = small(work=counting)

    async def browser():
        explorer._handle_custom_msg({"set": {"x": 7}}, [])
        task = explorer._task
        while not task.done():
            await asyncio.sleep(0.001)
        assert isinstance(task.exception(), ArithmeticError)

    asyncio.run(browser())
    assert explorer.shown["error"] == "ArithmeticError: no seven here" and explorer.shown["done"] == 1.0
    explorer.set(x=2)
    assert explorer.shown["error"] == ""


def test_readers_own_matplotlib_settings_do_not_reach_the_picture():
    plain = small().png
    with plt.style.context("dark_background"):
        assert small().png == plain


def test_twenty_five_changes_leave_one_picture():
    explorer = small()
    for x in [*range(11), *range(11), 1, 2, 3]:
        explorer.set(x=x)
    data, _ = explorer._repr_mimebundle_()
    assert [key for key in data if key.startswith("image/")] == ["image/png"]


# --- the canvas


@pytest.mark.parametrize("where", [(200, 100), (-20, 100), (395, 100), (200, 195), (200, 5), (900, 900)])
def test_stamped_text_is_the_same_text(where):
    """At whole pixels a stamp gives what Agg draws: at the edges, turned, colored, half clear, as mathtext."""
    pictures = []
    for kind in (Canvas, FigureCanvasAgg):
        with style.applied():
            figure = Figure(figsize=(4, 2), dpi=100)
            canvas = kind(figure)
            canvas.draw()
        renderer, gc = canvas.get_renderer(), canvas.get_renderer().new_gc()
        gc.set_foreground("#0072B2")
        gc.set_alpha(0.7)
        font = FontProperties(size=13)
        for _ in range(2):  # the second time it is copied
            renderer.draw_text(gc, *where, "rms after", font, 30)
            renderer.draw_text(gc, *where, r"$10^{-5}$", font, 0, ismath=True)
        pictures.append(np.asarray(canvas.buffer_rgba()).astype(int))
    assert (pictures[0][..., 3] == 255).all()
    assert abs(pictures[0] - pictures[1]).max() <= 6  # of 255
    assert (pictures[1] != 255).any() == (where != (900, 900))


@pytest.mark.parametrize("look", [{}, {"family": "DejaVu Sans Mono", "size": 8}, {"weight": "bold", "size": 21}])
def test_texts_are_laid_out_as_by_matplotlib(look):
    """Font heights are kept, and are those that matplotlib looks up: one line and three, small and large, at 80 dpi."""
    boxes = []
    for kind in (Canvas, FigureCanvasAgg):
        figure = Figure(figsize=(4, 2), dpi=80)
        canvas = kind(figure)
        texts = [figure.text(0.5, 0.5, words, va="top", **look) for words in ("a", "Ag\nj\nloss", "g")]
        boxes.append([text.get_window_extent(canvas.get_renderer()).bounds for text in texts])
    np.testing.assert_allclose(*boxes, rtol=1e-12)


def test_png_holds_the_pixels():
    explorer = small()
    np.testing.assert_array_equal(pixels(explorer.png), np.asarray(explorer.canvas.buffer_rgba())[..., :3])


# --- the style


def test_colors_are_readable_and_never_alone():
    def luminance(color):
        channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
        return float(np.dot(channels, [0.2126, 0.7152, 0.0722]))

    for meaning, look in style.LOOKS.items():
        assert 1.05 / (luminance(look.color) + 0.05) >= 4.5, f"{meaning}: too pale to read on white"
    groups = [
        ["query", "key", "value"],
        ["before", "after", "reference", "wrong"],
        ["residual", "norm", "gate", "up"],
        ["embedding end", "head end"],
    ]
    for group in [*groups, [f"expert {i}" for i in range(8)]]:
        looks = [style.look(meaning) for meaning in group]
        for part in ("color", "marker", "linestyle", "hatch"):
            assert len({str(getattr(look, part)) for look in looks}) == len(looks), f"{group}: same {part}"


def test_notebook_plots_work(tmp_path):
    with plt.rc_context():
        style.use()
        figure, axes = plt.subplots()
        axes.plot([1, 2], **style.line("query", marker=True))
        axes.bar([0], [1], **style.fill("key"))
        style.label(axes, 1, 1, "query", "query")
        figure.savefig(tmp_path / "plot.png")
        plt.close(figure)
    with pytest.raises(KeyError, match="known meanings"):
        style.color("purple")


def test_unknown_explorer():
    with pytest.raises(ValueError, match="there is no explorer 'rope2'"):
        explorers.module("rope2")
