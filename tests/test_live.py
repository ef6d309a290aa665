"""The live view of a training: stop, go on, lose nothing; and what it shows is what was trained."""

import asyncio
import importlib.util
import io
import os
import signal
import threading
import time

import nbformat
import numpy as np
import pytest
import torch
from conftest import find_chromium
from lab import (
    ROOT,
    browser_page,
    close_notebook,
    error_outputs,
    jupyter_lab,
    new_notebook,
    open_notebook,
    time_limit,
)
from PIL import Image

import minimind_core as core
from minimind_core.data import Samples
from minimind_core.explorers import live
from minimind_core.explorers.shell import Explorer
from minimind_core.tokenizer import ByteTokenizer
from minimind_core.training import Trainer, TrainingSettings

SIZES = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
EXPERTS = {"use_moe": True, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": False}
TEXT = ["the cat sat on the mat, and the dog lay on the log. " * 8]


def make(steps: int = 12, every: int = 4, held_out: bool = True, **moe) -> Trainer:
    torch.manual_seed(0)
    samples = Samples.from_texts(TEXT, ByteTokenizer(), 16, packed=True)
    model = core.MiniMindForCausalLM(core.MiniMindConfig(**SIZES, **moe))
    settings = TrainingSettings(steps=steps, batch_size=4, learning_rate=0.01, evaluate_every=every)
    device = torch.get_default_device()
    return Trainer(model, samples, settings, [samples[0], samples[1]] if held_out else None, device)


def both(**options) -> dict[str, Trainer]:
    return {"dense": make(**options), "MoE": make(**options, **EXPERTS)}


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def run(view: live.LiveView, updates: int | None = None) -> None:
    asyncio.run(view.run(updates))


@pytest.fixture
def view() -> live.LiveView:
    return live.watch(both(), lines={"unigram": 3.0, "bigram": 2.0}, sample=lambda model: f"text {id(model)}")


@pytest.fixture(scope="module")
def unstopped() -> dict[str, torch.Tensor]:
    trainers = both()
    for trainer in trainers.values():
        for _ in trainer.run():
            pass
    return {name: weights(trainer) for name, trainer in trainers.items()}


def same(view: live.LiveView, unstopped: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weights(trainer), unstopped[name]) for name, trainer in view.trainers.items())


def test_it_trains_as_the_trainers_do(view, unstopped):
    assert isinstance(view, Explorer) and view.done == 0
    run(view)
    assert same(view, unstopped) and view.done == 1 and view.remark == ""
    assert [record.step for record in view.histories["MoE"].records] == list(range(1, 13))


@pytest.mark.parametrize("updates", [1, 5, 12, 99])
def test_some_updates_more(view, unstopped, updates):
    run(view, updates)
    assert {trainer.step for trainer in view.trainers.values()} == {min(updates, 12)}
    run(view)
    assert same(view, unstopped)
    run(view)  # nothing is left
    assert same(view, unstopped) and view.shown["done"] == 1


@pytest.mark.parametrize("at", [1, 4, 7])
def test_stopped_in_mid_run_it_goes_on(view, unstopped, at, monkeypatch):
    """Stop comes from another thread, while one model is a step ahead of the other."""
    trainer = view.trainers["dense"]
    update = trainer._update

    def pressed():
        if trainer.step + 1 == at:
            press = threading.Thread(target=view._handle_custom_msg, args=({"stop": True}, []))
            press.start()
            press.join()
        return update()

    monkeypatch.setattr(trainer, "_update", pressed)
    run(view)
    assert trainer.step == at and view.trainers["MoE"].step in (at - 1, at)
    assert (
        view.remark
        == f"Stopped: dense at update {at} of 12 and MoE at update {view.trainers['MoE'].step} of 12. "
        + ("Run the cell again to go on.")
    )
    assert view.shown["working"] is False and 0 < view.shown["done"] < 1
    run(view)
    assert same(view, unstopped) and view.remark == ""


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process there")
def test_an_interrupt_is_a_stop(view, unstopped, monkeypatch):
    trainer, before = view.trainers["dense"], signal.getsignal(signal.SIGINT)
    update = trainer._update

    def interrupted():
        if trainer.step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return update()

    monkeypatch.setattr(trainer, "_update", interrupted)
    run(view)  # raises nothing
    assert trainer.step == 6 and view.remark.startswith("Stopped: dense at update 6 of 12")
    assert signal.getsignal(signal.SIGINT) is before
    run(view)
    assert same(view, unstopped)


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends the process there")
def test_a_second_interrupt_breaks_off(view, unstopped):
    def hangs(model):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return "written all the same"

    run(view, 3)
    sample, view.sample = view.sample, hangs
    with pytest.raises(KeyboardInterrupt):
        run(view)
    view.sample = sample
    run(view)
    assert same(view, unstopped) and [record.step for record in view.histories["dense"].records] == list(range(1, 13))


def test_an_error_is_raised_and_the_run_can_go_on(view, unstopped, monkeypatch):
    trainer, update = view.trainers["MoE"], view.trainers["MoE"]._update

    def broken():
        if trainer.step == 3:
            raise FloatingPointError("planted")
        return update()

    monkeypatch.setattr(trainer, "_update", broken)
    with pytest.raises(FloatingPointError, match="planted"):
        run(view)
    assert view.shown["working"] is False and "MoE at update 3 of 12" in view.shown["remark"]
    monkeypatch.setattr(trainer, "_update", update)
    run(view)
    assert same(view, unstopped)


def test_only_one_run_at_a_time(view, unstopped):
    async def twice():
        first = asyncio.create_task(view.run())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="trains already"):
            await view.run()
        await first

    asyncio.run(twice())
    assert same(view, unstopped)


def test_stop_when_nothing_runs(view):
    serial = view.shown["serial"]
    view._handle_custom_msg({"stop": True}, [])
    assert view.shown["serial"] > serial and "Run the cell again to go on" in view.shown["remark"]
    run(view)
    view._handle_custom_msg({"stop": True}, [])
    assert view.shown["remark"] == "All updates are done."


def test_a_new_view_knows_what_was_trained(view):
    run(view, 8)
    again = live.watch(view.trainers)
    assert [record.step for record in again.histories["dense"].records] == list(range(1, 9))
    run(again)
    assert [record.step for record in view.histories["dense"].records] == list(range(1, 13))


def test_the_pictures_come_while_it_trains(monkeypatch):
    monkeypatch.setattr(live, "PAUSE", 0)
    view, seen = live.watch(both()), []
    view.observe(
        lambda change: seen.append((change.new["done"], change.new["working"], change.new["sentence"])), "shown"
    )
    run(view)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert len(seen) == 12 + 3  # before, after each turn, the turn that finds nothing left, at the end
    assert all(working for _, working, _ in seen[:-1]) and seen[-1][:2] == (1.0, False)
    assert len({sentence for _, _, sentence in seen}) == 13  # the last is drawn twice


def test_the_picture_is_the_records(view):
    run(view, 10)
    scene, history = view.scene["models"]["dense"], view.histories["dense"]
    np.testing.assert_array_equal(scene["training"].get_ydata(), [record.loss for record in history.records])
    held_out = [(r.step, r.held_out_loss) for r in history.records if r.held_out_loss is not None]
    assert [step for step, _ in held_out] == [4, 8]
    np.testing.assert_array_equal(np.transpose(scene["held_out"].get_data()), held_out)
    assert f"{held_out[-1][1]:.2f} held out" in scene["label"].get_text()
    assert view.scene["axes"].get_xlim() == (0, 12)
    for (line, label), (name, level) in zip(view.scene["lines"], view.lines.items(), strict=True):
        assert list(line.get_ydata()) == [level] * 2 and label.get_text() == f"{name}\n{level:.2f}"
    low, high = view.scene["axes"].get_ylim()
    assert low < min(2.0, held_out[-1][1]) and high > history.records[0].loss


def test_samples_before_during_and_after(view):
    run(view, 6)
    run(view)
    steps = [step for step, _ in view.histories["dense"].samples]
    assert steps == [0, 4, 6, 8, 12]
    texts = {name: {text for _, text in history.samples} for name, history in view.histories.items()}
    assert texts["dense"] == {f"text {id(view.trainers['dense'].model)}"} and texts["dense"] != texts["MoE"]
    assert view.scene["models"]["MoE"]["head"].get_text() == "MoE 12"
    assert view.scene["models"]["MoE"]["text"].get_text() in texts["MoE"]


@pytest.mark.filterwarnings("error")
def test_any_text_can_be_drawn():
    view = live.watch({"one": make()}, sample=lambda model: "a\n$x_1$ 漢字 \ufffd \x00" + "w" * 200)
    run(view, 1)
    shown = view.scene["models"]["one"]["text"].get_text()
    assert shown.startswith("a↵$x_1$ □□ ") and len(shown) == live.WRITTEN


def test_sentence_says_where_each_model_stands(view):
    assert view.sentence == "dense: 0 of 12 updates. MoE: 0 of 12 updates."
    run(view, 2)
    loss = np.mean([record.loss for record in view.histories["dense"].records])
    assert (
        f"dense: 2 of 12 updates, {loss:.2f} nats per token in training: {loss - 3:.2f} above the unigram"
        in view.sentence
    )
    run(view)
    held_out = view.histories["MoE"].records[-1].held_out_loss
    words = f"MoE: 12 of 12 updates, {held_out:.2f} nats per token held out, at update 12: "
    level = f"{abs(held_out - 2):.2f} {'below' if held_out < 2 else 'above'} the bigram."
    assert words in view.sentence and view.sentence.endswith(level)
    assert view.shown["sentence"] == view.sentence


def test_the_text_of_the_output_is_the_same_before_and_after(view):
    words = "<Explorer live: dense 12 updates, MoE 12 updates; beside them unigram, bigram>"
    assert repr(view) == words
    first = view._repr_mimebundle_()[0]
    run(view)
    data = view._repr_mimebundle_()[0]
    assert data["text/plain"] == first["text/plain"] == words
    assert data["image/png"] != first["image/png"]
    assert sorted(data) == ["application/vnd.jupyter.widget-view+json", "image/png", "text/plain"]


def test_without_lines_samples_or_held_out_text():
    view = live.watch({"alone": make(held_out=False)})
    size = Image.open(io.BytesIO(view.png)).size
    run(view)
    assert "in training." in view.sentence and Image.open(io.BytesIO(view.png)).size == size


def test_labels_of_near_lines_do_not_overlap():
    view = live.watch({"one": make()}, lines={"a": 2.50, "b": 2.52, "c": 2.48, "d": 6.0})
    boxes = [label.get_window_extent(view.canvas.get_renderer()) for _, label in view.scene["lines"]]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(box.x1 <= view.figure.bbox.x1 for box in boxes)


def test_too_many_or_none():
    with pytest.raises(ValueError, match="0 trainers and 0 lines; give 1 to 4 and at most 4"):
        live.watch({})
    with pytest.raises(ValueError, match="1 trainers and 5 lines"):
        live.watch({"one": make()}, lines=dict.fromkeys("abcde", 1.0))


def test_the_figure_is_the_one_in_the_notebook(tmp_path):
    spec = importlib.util.spec_from_file_location("build", ROOT / "figures" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.save_live(tmp_path / "live.png").startswith("<Explorer live: dense 300 updates")
    stored = (ROOT / "figures" / "live_training.png").read_bytes()
    assert (tmp_path / "live.png").read_bytes() == stored, "live_training.png is out of date: run `make figures`"


# --- in a real JupyterLab

BEFORE = f"""\
import torch
import minimind_core as core
from minimind_core.data import Samples
from minimind_core.explorers import live
from minimind_core.tokenizer import ByteTokenizer
from minimind_core.training import Trainer, TrainingSettings

def make():
    torch.manual_seed(0)
    samples = Samples.from_texts({TEXT!r}, ByteTokenizer(), 16, packed=True)
    model = core.MiniMindForCausalLM(core.MiniMindConfig(**{SIZES!r}))
    return Trainer(model, samples, TrainingSettings(steps=400, batch_size=4), device=torch.device("cpu"))

view = live.watch({{"one": make()}}, sample=lambda model: "text")"""
AFTER = """\
whole = make()
list(whole.run())
pairs = zip(whole.model.parameters(), view.trainers["one"].model.parameters())
print(view.trainers["one"].step, all(torch.equal(a, b) for a, b in pairs))"""
RUN = """cell => {
    const panel = window.jupyterapp.shell.currentWidget;
    panel.content.deselectAll();
    panel.content.activeCellIndex = cell;
    window.jupyterapp.commands.execute("notebook:run-cell");
}"""
IDLE = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'"
WORKING = """([root, from]) => root.querySelector(".mm-work button").textContent === "Stop"
    && root.dataset.done > from + 0.02 && root.dataset.done < 1"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    chromium = find_chromium()
    path = tmp_path_factory.mktemp("live") / "live.ipynb"
    nbformat.write(new_notebook(BEFORE, "await view.run()", AFTER), path)
    with time_limit(180), jupyter_lab([path]) as running, browser_page(chromium) as page:
        yield running, page


def test_in_jupyterlab_stop_and_interrupt_end_the_cell_and_it_goes_on(lab):
    """The picture moves while the cell runs; a press of Stop, then an interrupt; then on to the end."""
    running, page = lab
    open_notebook(page, running, "live.ipynb")
    page.evaluate(RUN, 0)
    page.evaluate(RUN, 1)
    done = 0.0
    for way in ("stop", "interrupt"):
        page.wait_for_selector(".mm-explorer img", timeout=20_000)
        root = page.query_selector(".mm-explorer")
        page.wait_for_function(WORKING, arg=[root, done], timeout=20_000)
        assert not page.evaluate(IDLE), "the cell is not busy"
        picture = root.query_selector("img").get_attribute("src")
        page.wait_for_function("([root, old]) => root.querySelector('img').src !== old", arg=[root, picture])
        if way == "stop":
            root.query_selector(".mm-work button").focus()
            page.keyboard.press("Enter")
        else:
            page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
        page.wait_for_function(IDLE, timeout=3000)
        page.wait_for_function(
            "() => document.querySelector('.mm-explorer [role=status]').textContent.startsWith('Stopped: one at ')"
        )
        root = page.query_selector(".mm-explorer")
        done = float(root.get_attribute("data-done"))
        assert 0 < done < 1 and error_outputs(page) == []
        assert root.query_selector(".mm-work button").inner_text() == "Idle"
        assert root.query_selector("img").get_attribute("alt") == root.query_selector(".mm-sentence").inner_text()
        page.evaluate(RUN, 1)
    page.wait_for_function("() => document.querySelector('.mm-explorer')?.dataset.done === '1'", timeout=30_000)
    page.evaluate(RUN, 2)
    page.wait_for_function(
        "() => document.querySelector('.jp-Notebook').innerText.includes('400 True')", timeout=30_000
    )
    assert len(page.query_selector_all(".mm-explorer")) == 1
    assert error_outputs(page) == [] and page.problems == []
    close_notebook(page)
