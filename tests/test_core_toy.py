"""The trained toy model: it loads, it has learned, and the way to make it works."""

import json
import subprocess
import sys

import pytest
import torch

from minimind_core import MiniMindForCausalLM, intermediates, toy

SENTENCES = (
    "The statement is executed when the class is called. ",
    "An object of this type has a method that returns ",
)


def loss(model: MiniMindForCausalLM) -> float:
    return sum(model(ids, labels=ids).loss.item() for ids in (torch.tensor([list(s.encode())]) for s in SENTENCES)) / 2


@pytest.mark.parametrize("kind", toy.CONFIGS)
@torch.no_grad()
def test_it_has_learned(kind):
    model = toy.toy_model(kind)
    assert not model.training and model.lm_head.weight is model.model.embed_tokens.weight
    assert all(p.dtype == torch.float32 and not p.is_meta for p in model.parameters())
    torch.manual_seed(0)
    assert loss(model) < 2.0 < 5.0 < loss(MiniMindForCausalLM(toy.CONFIGS[kind]).eval())


@torch.no_grad()
def test_every_expert_has_work():
    model = toy.toy_model("moe")
    ids = torch.tensor([list(toy.text()[:512])])
    for path, idx in intermediates(model, ids):
        if path.endswith("topk_idx"):
            assert len(idx.unique()) == 4, path


def test_they_come_small_with_their_logs():
    files = [toy.weights_file(kind) for kind in toy.CONFIGS]
    assert sum(file.stat().st_size for file in files) < 5e6
    for file in files:
        log = [json.loads(line) for line in file.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
        assert log[-1]["step"] == toy.STEPS and log[-1]["loss"] < log[0]["loss"]
        assert log[-1]["held_out_loss"] < 1.5  # nats per byte, on paragraphs that were not read


def test_what_is_held_out_was_not_read():
    data = toy.text()
    samples = toy.held_out(data)
    assert len(samples) >= 20
    read = set(data[: -toy.HELD_OUT].splitlines())
    lines = b"".join(bytes(ids.tolist()) for ids, _ in samples).splitlines()
    known = [line for line in lines if len(line) > 40 and line in read]
    assert len(known) < 0.2 * len(lines)


@pytest.mark.parametrize("kind", toy.CONFIGS)
def test_training_learns_and_what_is_saved_loads(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "weights_file", lambda kind: tmp_path / f"{kind}.safetensors")
    for name, value in {"BATCH": 4, "LENGTH": 32, "HELD_OUT": 320}.items():
        monkeypatch.setattr(toy, name, value)
    with pytest.raises(FileNotFoundError, match=rf"{kind}.safetensors is missing .* `make toy-model`"):
        toy.toy_model(kind)
    model, log = toy.train(kind, steps=12)
    assert log[-1]["step"] == 12 and log[-1]["held_out_loss"] < 5.0
    toy.save(kind, model, log)
    again = toy.toy_model(kind)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other, one.to("cpu"), rtol=1e-3, atol=1e-6, msg=name)
    assert [json.loads(line) for line in (tmp_path / f"{kind}.jsonl").read_text().splitlines()] == log
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{kind}.jsonl", f"{kind}.safetensors"]


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="there is no toy model 'big'; choose one of dense, moe"):
        toy.toy_model("big")


def test_loaded_only_on_use():
    late = "{'safetensors', 'pydoc_data.topics', 'minimind_core.toy', 'minimind_core.training'}"
    code = f"import sys, minimind_core; assert not {late} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
