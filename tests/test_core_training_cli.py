"""python -m minimind_core.training: what it leaves behind, how it stops and goes on, what it says when it cannot."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from minimind_core import MiniMindConfig, MiniMindForCausalLM
from minimind_core.data import Samples
from minimind_core.pretrained import from_pretrained
from minimind_core.tokenizer import ByteTokenizer, Tokenizer
from minimind_core.training import Trainer, processes
from minimind_core.training.__main__ import main
from minimind_core.training.options import parse

LIMIT = 60  # seconds for one process
SMALL = "--hidden-size 16 --heads 2 --kv-heads 1 --layers 1 --length 16 --batch-size 3 --dropout 0.1".split()
TEXTS = ["The cat sat on the mat. " * 9, "A dog, a log, a frog. " * 12, "Grün ist die Wiese. " * 8]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("MINIMIND_DEVICE", "cpu")


@pytest.fixture
def data(tmp_path) -> str:
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    return str(tmp_path / "texts.txt")


def train(out: Path, data: str | None, *options: str) -> int:
    return main(["--out", str(out), *(["--data", data] if data else []), *SMALL, *options])


def read_log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def at_micro_batch(monkeypatch, number: int, action) -> None:
    """Call action() when the trainer comes to this micro-batch, counted from 1."""
    calls, backward = [], Trainer._backward

    def wrapped(trainer, ends):
        calls.append(None)
        if len(calls) == number:
            action()
        backward(trainer, ends)

    monkeypatch.setattr(Trainer, "_backward", wrapped)


def test_a_run_leaves_model_log_and_checkpoint(tmp_path, data, capsys):
    out = tmp_path / "out"
    assert train(out, data, "--steps", "5", "--evaluate-every", "2", "--warm-up", "1", "--dtype", "bfloat16") == 0
    log = read_log(out)
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5]
    assert [line["held_out_loss"] is not None for line in log] == [False, True, False, True, True]
    assert {"loss", "learning_rate", "tokens", "gradient_norm"} <= set(log[0]) and log[-1]["tokens"] == 5 * 3 * 15
    assert log[0]["learning_rate"] == pytest.approx(5e-4)
    model, checkpoint = from_pretrained(out), torch.load(out / "checkpoint.pt", weights_only=True)
    assert all(torch.equal(value, checkpoint["weights"][name]) for name, value in model.state_dict().items())
    error = capsys.readouterr().err
    for part in ("texts.txt: 3 texts used", "update 2 of 5: loss 5.", "held out 5.", "done: the model is in"):
        assert part in error
    assert sorted(file.name for file in out.iterdir()) == [
        "checkpoint.pt", "config.json", "log.jsonl", "model.safetensors", "options.json"
    ]  # fmt: skip
    assert train(out, None, "--resume") == 0 and read_log(out) == log  # nothing is left to do


LONG = ["--steps", "4", "--accumulation", "3", "--experts", "2", "--experts-per-token", "2", "--evaluate-every", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 micro-batches that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "texts.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    os.environ["MINIMIND_DEVICE"] = "cpu"
    assert train(folder / "out", str(folder / "texts.txt"), *LONG) == 0
    return folder / "out", str(folder / "texts.txt")


@pytest.mark.parametrize("number, code, places", [(signal.SIGINT, 130, (2, 6)), (signal.SIGTERM, 143, (1, 4, 11))])
def test_a_stopped_run_goes_on_bit_for_bit(whole, tmp_path, monkeypatch, capsys, number, code, places):
    expected, data = whole
    out, handlers = tmp_path / "out", [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    for i, place in enumerate(places):
        with monkeypatch.context() as patch:
            at_micro_batch(patch, place - (places[i - 1] if i else 0), lambda: os.kill(os.getpid(), number))
            arguments = ["--out", str(out), "--resume"] if i else ["--out", str(out), "--data", data, *SMALL, *LONG]
            assert main(arguments) == code
        state = torch.load(out / "checkpoint.pt", weights_only=True)["counters"]
        assert (state["step"], state["micro"]) == divmod(place, 3)
        error = capsys.readouterr().err
        assert f"stopped after {place // 3} of 4 updates and saved; go on with\n  python -m minimind_core" in error
        assert f"--out {out} --resume" in error and not (out / "model.safetensors").exists()
    assert main(["--out", str(out), "--resume"]) == 0
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert read_log(out) == read_log(expected) and len(read_log(out)) == 4
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_after_a_crash_the_log_is_cut_back_to_the_checkpoint(whole, tmp_path, monkeypatch):
    expected, data = whole
    out = tmp_path / "out"

    def crash():
        raise MemoryError

    with monkeypatch.context() as patch:
        at_micro_batch(patch, 10, crash)
        with pytest.raises(MemoryError):
            train(out, data, *LONG, "--save-every", "2")
    assert len(read_log(out)) == 3
    with open(out / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"step": 4, "lo')
    assert main(["--out", str(out), "--resume"]) == 0
    assert read_log(out) == read_log(expected)
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_nothing_is_overwritten_and_nothing_else_is_resumed(whole, tmp_path, capsys):
    out, _ = whole
    before = {file: file.read_bytes() for file in out.iterdir()}

    def refused(*arguments: str) -> str:
        assert main(list(arguments)) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error and {file: file.read_bytes() for file in out.iterdir()} == before
        return error

    assert f"{out} already holds checkpoint.pt; go on with --resume, or choose" in refused("--out", str(out), *SMALL)
    assert "holds no checkpoint.pt to go on with" in refused("--out", str(tmp_path / "new"), "--resume")
    error = refused("--out", str(out), "--resume", "--learning-rate", "0.5", "--clip", "2")
    assert "learning_rate is 0.001 there, 0.5 here" in error and "clip is 1.0 there, 2.0 here" in error
    error = refused("--out", str(out), "--resume", "--hidden-size", "32")
    assert "hidden_size is 16 there, 32 here; leave it out" in error
    assert "steps is 4 there, 9 here" in refused("--out", str(out), "--resume", "--steps", "9")
    assert "steps is 4 there, 5 here" in refused("--out", str(out), "--resume", "--epochs", "1")
    assert "length is 16 there, 17 here" in refused("--out", str(out), "--resume", "--length", "17")


@pytest.mark.parametrize(
    "options, message",
    [
        ("--heads 3", "num_attention_heads 3"),
        ("--heads 2 --kv-heads 4", "num_attention_heads 2 is not divisible by num_key_value_heads 4"),
        ("--experts 2 --experts-per-token 3", "num_experts_per_tok 3 is larger than num_experts 2"),
        ("--experts -1", "--experts is -1; give 0"),
        ("--learning-rate -1", "learning_rate is -1.0; it must be above 0"),
        ("--warm-up 9 --steps 9", "warm_up is 9 of 9 steps"),
        ("--batch-size 0", "batch_size is 0"),
        ("--length 1", "length 1"),
        ("--held-out 0.7", "--held-out is 0.7; give a share of at least 0 and at most 0.5"),
        ("--held-out 0.001", "--held-out 0.001 of 40 samples is none"),
        ("--save-every -1", "--save-every is -1"),
        ("--data missing.txt", "missing.txt"),
        ("--tokenizer nowhere.json", "nowhere.json is not there"),
        ("--tokenizer train:many", "say how many tokens, as in train:6400"),
        ("--tokenizer train:100", "vocab_size 100 is below 292"),
        ("--config missing.json", "missing.json is no file"),
        ("--config typo.json", "typo.json: .*hiden_size"),
        ("--config list.json", "list.json holds a list, not an object"),
        ("--config broken.json", "broken.json is no JSON"),
        ("--config small.json", "vocab_size 100, but the tokenizer has 256 tokens"),
    ],
)
def test_wrong_values_are_said_in_a_line(tmp_path, data, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    files = {"typo": '{"hiden_size": 8}', "list": "[1]", "broken": "{", "small": '{"vocab_size": 100}'}
    for name, text in files.items():
        Path(f"{name}.json").write_text(text, encoding="utf-8")
    assert train(tmp_path / "out", data, *options.split()) == 2
    error = capsys.readouterr().err
    assert re.search(r"\nerror: .*" + message, "\n" + error) and "Traceback" not in error
    assert not (tmp_path / "out" / "checkpoint.pt").exists()


@pytest.mark.parametrize("options", ["--layers two", "--dtype half", "--steps 3 --epochs 1", "--lenght 5", ""])
def test_what_cannot_be_read_shows_the_usage(options, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--out", "x", *options.split()] if options else [])
    assert stop.value.code == 2 and "usage: python -m minimind_core.training" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_a_wrong_value(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINIMIND_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train(tmp_path / "out", None) == 2 and "error: MINIMIND_DEVICE=cuda, but" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_with_its_reason(tmp_path, data, capsys, monkeypatch):
    def spoil():
        monkeypatch.setattr(processes, "add", lambda *numbers: [float("nan"), 0.0])

    with monkeypatch.context():
        at_micro_batch(monkeypatch, 2, spoil)
        code = train(tmp_path / "out", data, "--steps", "4")
    error = capsys.readouterr().err
    assert code == 1 and "error: the loss of update 2 is nan (learning rate" in error and "saved in " in error
    monkeypatch.undo()
    monkeypatch.setenv("MINIMIND_DEVICE", "cpu")
    assert main(["--out", str(tmp_path / "out"), "--resume"]) == 0  # nothing was lost
    assert train(tmp_path / "whole", data, "--steps", "4") == 0
    assert read_log(tmp_path / "out") == read_log(tmp_path / "whole")


def test_deterministic_algorithms_are_kept_when_resuming(tmp_path, data, monkeypatch):
    calls, out = [], tmp_path / "out"
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    assert train(out, data, "--steps", "1") == 0 and calls == []
    assert train(tmp_path / "other", data, "--steps", "1", "--deterministic") == 0 and calls == [True]
    assert main(["--out", str(tmp_path / "other"), "--resume"]) == 0 and calls == [True, True]


# ---------------------------------------------------------------- options


def config_of(tmp_path, *options: str, tokenizer=None):
    return parse(["--out", str(tmp_path), *options]).config(tokenizer or ByteTokenizer())


def test_options_shape_the_model(tmp_path):
    config = config_of(tmp_path)
    shape = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert shape == (128, 4, 4, 2) and config.vocab_size == 256 and not config.use_moe and config.dropout == 0
    config = config_of(tmp_path, "--hidden-size", "64", "--layers", "3", "--experts", "5", "--intermediate-size", "72")
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim, config.moe_intermediate_size) == (
        64,
        3,
        16,
        72,
    )
    assert (config.use_moe, config.num_experts, config.num_experts_per_tok) == (True, 5, 1)
    assert config.router_gradient == "straight_through"  # with "exact" the router of one expert a token learns nothing


def test_options_win_over_the_config_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 96, "num_hidden_layers": 7, "use_moe": true, "vocab_size": 300}')
    config = config_of(tmp_path, "--config", str(file), "--layers", "2")
    assert (config.hidden_size, config.num_hidden_layers, config.use_moe, config.vocab_size) == (96, 2, True, 300)
    assert config.num_attention_heads == 8  # MiniMindConfig's default, not the command line's
    assert not config_of(tmp_path, "--config", str(file), "--experts", "0").use_moe
    tokenizer = Tokenizer.train(TEXTS, 300)
    config = config_of(tmp_path, tokenizer=tokenizer)
    assert config.vocab_size == 300 and (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_settings_come_from_options(tmp_path):
    settings = parse(["--out", str(tmp_path), "--clip", "0", "--epochs", "2.5", "--seed", "7"]).settings()
    assert (settings.clip, settings.epochs, settings.steps, settings.seed) == (None, 2.5, None, 7)
    assert settings.evaluate_every == 100 and settings.batch_size == 16


# ---------------------------------------------------------------- data and tokenizers


def test_a_trained_tokenizer_is_kept_and_used_again(tmp_path, data, monkeypatch):
    out, options = tmp_path / "out", ("--tokenizer", "train:300", "--steps", "3")
    with monkeypatch.context() as patch:
        at_micro_batch(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train(out, data, *options) == 130
    assert Tokenizer.load(out).vocab_size == 300
    monkeypatch.setattr(Tokenizer, "train", None)
    assert main(["--out", str(out), "--resume"]) == 0
    assert from_pretrained(out).config.vocab_size == 300 and len(read_log(out)) == 3
    other = tmp_path / "other"
    assert train(other, data, "--tokenizer", str(out / "tokenizer.json"), "--steps", "3") == 0
    assert (other / "tokenizer.json").is_file()
    assert (other / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_chats_are_trained_on_unpacked(tmp_path, capsys):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, what can I do for you?"}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"conversations": chat}) + "\n" for _ in range(9)) + "nonsense\n")
    options = ("--tokenizer", "train:300", "--length", "64", "--steps", "2", "--held-out", "0.2")
    assert train(tmp_path / "out", str(file), *options) == 2
    assert "which are not packed; use --no-packed" in capsys.readouterr().err
    assert train(tmp_path / "out", str(file), *options, "--no-packed") == 0
    error = capsys.readouterr().err
    assert "9 conversations used, 1 left out" in error and "8 samples of 64 tokens and 1 held out" in error
    assert read_log(tmp_path / "out")[0]["tokens"] < 3 * 63


# ---------------------------------------------------------------- weights that have learned


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A small mixture of experts, trained on texts, with its tokenizer."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "texts.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    os.environ["MINIMIND_DEVICE"] = "cpu"
    options = ("--tokenizer", "train:300", "--steps", "30", "--learning-rate", "0.01", "--experts", "2")
    assert train(folder / "out", str(folder / "texts.txt"), *options) == 0
    return folder / "out"


@pytest.fixture
def chats(tmp_path) -> str:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The cat sat on the mat."}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"conversations": chat}) + "\n") * 9)
    return str(tmp_path / "chats.jsonl")


CHAT = ["--no-packed", "--length", "64", "--steps", "4", "--accumulation", "2", "--batch-size", "2", "--held-out", "0"]


def test_a_run_can_start_from_weights_that_have_learned(learned, chats, tmp_path, monkeypatch):
    start, out = tmp_path / "start", tmp_path / "out"
    shutil.copytree(learned, start)
    chat = ["--data", chats, "--dropout", "0.1", *CHAT]
    assert main(["--out", str(tmp_path / "new"), "--data", chats, *SMALL, *CHAT, "--tokenizer", str(start)]) == 0
    with monkeypatch.context() as patch:
        at_micro_batch(patch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert main(["--out", str(out), "--from", str(start), *chat]) == 130
    shutil.rmtree(start)  # to go on, the folder of the run is enough
    assert main(["--out", str(out), "--resume"]) == 0
    assert read_log(out)[0]["loss"] < read_log(tmp_path / "new")[0]["loss"] - 0.5
    assert (out / "tokenizer.json").read_bytes() == (learned / "tokenizer.json").read_bytes()
    unstopped = tmp_path / "unstopped"
    assert main(["--out", str(unstopped), "--from", str(learned), *chat]) == 0
    assert (out / "model.safetensors").read_bytes() == (unstopped / "model.safetensors").read_bytes()
    config = from_pretrained(out).config
    assert (config.num_experts, config.router_gradient, config.dropout) == (2, "straight_through", 0.1)


def test_the_first_loss_is_that_of_the_weights(learned, chats, tmp_path):
    options = [
        "--no-packed",
        "--length",
        "64",
        "--steps",
        "1",
        "--batch-size",
        "9",
        "--held-out",
        "0",
        "--dropout",
        "0",
    ]
    assert main(["--out", str(tmp_path / "out"), "--from", str(learned), "--data", chats, *options]) == 0
    samples = Samples.from_file(chats, Tokenizer.load(learned), 64)
    expected = Trainer(from_pretrained(learned), samples).evaluate(samples)
    assert read_log(tmp_path / "out")[0]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_single_file_of_weights_can_be_the_start(chats, learned, tmp_path):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(vocab_size=300, hidden_size=64, num_hidden_layers=1))
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    options = ["--from", str(tmp_path / "weights.pth"), "--data", chats, *CHAT, "--learning-rate", "1e-9"]
    with pytest.warns(UserWarning, match="comes without a config"):
        assert main(["--out", str(tmp_path / "out"), "--tokenizer", str(learned), *options]) == 0
    weights = from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.allclose(value, weights[name], atol=1e-6) for name, value in model.state_dict().items())


def test_what_does_not_fit_the_start_is_said(learned, tmp_path, capsys):
    def refused(*options: str) -> str:
        assert main(["--out", str(tmp_path / "out"), *options]) == 2
        return capsys.readouterr().err

    assert "neither a folder nor a file" in refused("--from", str(tmp_path / "nowhere"))
    error = refused("--from", str(learned), "--layers", "2", "--experts", "4")
    assert "the weights of --from have num_hidden_layers 1, not 2; num_experts 2, not 4; leave" in error
    error = refused("--from", str(learned), "--tokenizer", "train:400")
    assert "the weights of --from know their own tokens" in error
    assert "has vocab_size 300, bytes are 256" in refused("--from", str(learned), "--tokenizer", "bytes")
    Tokenizer.train(TEXTS, 310).save(tmp_path)
    assert "but the tokenizer has 310 tokens" in refused("--from", str(learned), "--tokenizer", str(tmp_path))


def test_weights_without_a_config_need_one(learned, chats, tmp_path, capsys):
    start = tmp_path / "start"
    shutil.copytree(learned, start, ignore=shutil.ignore_patterns("config.json"))
    options = ["--out", str(tmp_path / "out"), "--from", str(start), "--data", chats, *CHAT]
    assert main(options) == 2 and "has no config.json; give --config" in capsys.readouterr().err
    assert main([*options, "--config", str(learned / "config.json")]) == 0


def test_to_resume_the_folder_of_the_run_is_enough(data, tmp_path, monkeypatch, capsys):
    """Neither the tokenizer nor the config has to be where it was; --from has no place in it."""
    (tmp_path / "config.json").write_text(json.dumps({"use_moe": True, "vocab_size": 320, "hidden_size": 32}))
    Tokenizer.train(TEXTS, 300).save(tmp_path / "tokenizer.json")
    options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--config", str(tmp_path / "config.json")]
    options += ["--steps", "3", "--experts-per-token", "2"]
    assert train(tmp_path / "whole", data, *options) == 0
    with monkeypatch.context() as patch:
        at_micro_batch(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train(tmp_path / "out", data, *options) == 130
    (tmp_path / "config.json").unlink(), (tmp_path / "tokenizer.json").unlink()
    assert main(["--out", str(tmp_path / "out"), "--resume", "--from", str(tmp_path / "whole")]) == 2
    assert f"--from is None there, {tmp_path / 'whole'} here" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "out"), "--resume", "--tokenizer", "bytes"]) == 2
    assert "tokenizer.json there, bytes here" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "out"), "--resume"]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_another_s_files_are_not_overwritten(data, learned, tmp_path, capsys):
    for file in ("config.json", "tokenizer.json"):
        out = tmp_path / file.partition(".")[0]
        out.mkdir()
        shutil.copy(learned / file, out)
        assert train(out, data, "--steps", "1") == 2
        assert file in capsys.readouterr().err and sorted(out.iterdir()) == [out / file]
    with pytest.raises(SystemExit):
        main(["--out", ""])
    assert "--out is empty" in capsys.readouterr().err


def test_a_full_disk_is_said_and_loses_nothing(data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        at_micro_batch(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train(out, data, "--steps", "4") == 130
    before = (out / "checkpoint.pt").read_bytes()

    def full(state, file):
        file.write(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert main(["--out", str(out), "--resume"]) == 1
    error = capsys.readouterr().err
    assert "checkpoint.pt cannot be written: [enforce fail" in error and "Traceback" not in error
    assert (out / "checkpoint.pt").read_bytes() == before and len(list(out.glob(".*"))) == 0


def test_a_model_that_cannot_be_written_is_refused_before_it_is_trained(data, tmp_path, capsys):
    (tmp_path / "shared.json").write_text(json.dumps({"use_moe": True, "n_shared_experts": 1}))
    assert train(tmp_path / "out", data, "--config", str(tmp_path / "shared.json")) == 2
    assert "it has 1 shared experts in each layer" in capsys.readouterr().err


def test_several_files_make_one_run(tmp_path, data, capsys):
    other = tmp_path / "more.jsonl"
    other.write_text(json.dumps({"text": "More of it. " * 20}) + "\n")
    assert main(["--out", str(tmp_path / "out"), "--data", data, str(other), *SMALL, "--epochs", "0.5"]) == 0
    error = capsys.readouterr().err
    assert "texts.txt: 3 texts used" in error and "more.jsonl: 1 texts used" in error
    samples, held_out = re.search(r"(\d+) samples of 16 tokens and (\d+) held out", error).groups()
    assert (int(samples), int(held_out)) == (40 + 15 - 2, 2) and len(read_log(tmp_path / "out")) == 9


# ---------------------------------------------------------------- as a process


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of its own")
def test_in_a_terminal_it_shows_a_bar_and_ctrl_c_saves(tmp_path):
    import fcntl
    import pty
    import termios

    def read(terminal: int) -> str:
        try:
            return os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # its end
            return ""

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))  # rows, columns
    command = [
        sys.executable,
        "-m",
        "minimind_core.training",
        "--out",
        str(tmp_path / "out"),
        *SMALL,
        "--steps",
        "100000",
    ]
    options = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}, **options)
    os.close(theirs)
    watchdog = threading.Timer(LIMIT, process.kill)
    watchdog.start()
    text, sent = "", False
    try:
        while piece := read(ours):
            text += piece
            if "loss" in text and not sent:
                process.send_signal(signal.SIGINT)
                sent = True
        code = process.wait()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        os.close(ours)
    assert code == 130, text
    assert re.search(r"\d+/100000 .*loss \d\.\d", text) and "Traceback" not in text
    assert (tmp_path / "out" / "checkpoint.pt").is_file() and f"--out {tmp_path / 'out'} --resume" in text


def test_training_needs_nothing_but_torch_until_it_writes():
    late = "{'tqdm', 'tokenizers', 'safetensors', 'numpy.random'}"
    code = (
        f"import sys, minimind_core; assert 'minimind_core.training' not in sys.modules\n"
        f"import minimind_core.training; assert not {late} & (set(sys.modules) - BEFORE)"
    )
    code = "import sys, torch; BEFORE = set(sys.modules)\n" + code
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)
