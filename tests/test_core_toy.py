"""The trained toy model: it loads, it has learned, and the way to make it works."""

import json
import subprocess
import sys

import pytest
import torch

from minimind_core import MiniMindForCausalLM, toy

SENTENCES = (
    "The statement is executed when the class is called. ",
    "An object of this type has a method that returns ",
)


def loss(model: MiniMindForCausalLM) -> float:
    return sum(model(ids, labels=ids).loss.item() for ids in (torch.tensor([list(s.encode())]) for s in SENTENCES)) / 2


@torch.no_grad()
def test_it_has_learned():
    model = toy.toy_model()
    assert not model.training and model.lm_head.weight is model.model.embed_tokens.weight
    assert all(p.dtype == torch.float32 and not p.is_meta for p in model.parameters())
    torch.manual_seed(0)
    assert loss(model) < 2.0 < 5.0 < loss(MiniMindForCausalLM(toy.CONFIG).eval())


def test_it_comes_small_with_its_log():
    assert toy.WEIGHTS.stat().st_size < 5e6
    log = [json.loads(line) for line in toy.LOG.read_text(encoding="utf-8").splitlines()]
    assert log[-1]["step"] == toy.STEPS and log[-1]["held_out_loss"] < log[0]["held_out_loss"]


def test_training_learns_and_what_is_saved_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "WEIGHTS", tmp_path / "weights.safetensors")
    monkeypatch.setattr(toy, "LOG", tmp_path / "log.jsonl")
    for name, value in {"WARM_UP": 2, "BATCH": 4, "LENGTH": 32, "HELD_OUT": 320}.items():
        monkeypatch.setattr(toy, name, value)
    with pytest.raises(FileNotFoundError, match=r"weights.safetensors is missing .* `make toy-model`"):
        toy.toy_model()
    model, log = toy.train(steps=12, device=torch.device(type="cpu"))
    assert log[-1]["step"] == 12 and log[-1]["held_out_loss"] < 5.0
    toy.save(model, log)
    again = toy.toy_model()
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-6, msg=name)
    assert [json.loads(line) for line in toy.LOG.read_text(encoding="utf-8").splitlines()] == log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl", "weights.safetensors"]


def test_loaded_only_on_use():
    late = "{'safetensors', 'pydoc_data.topics', 'minimind_core.toy'}"
    code = f"import sys, minimind_core; assert not {late} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
