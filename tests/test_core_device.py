"""The core runs where its inputs are. Shown without a GPU: everything made without a device would land elsewhere."""

import ast
from pathlib import Path

import pytest
import torch
from reference import random_ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minimind_core
from minimind_core import pick_device, random_tensor, trace

CORE = Path(minimind_core.__file__).parent


class OneDevicePerOperation(TorchDispatchMode):
    """Raises when one operation meets tensors of two devices."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if len(devices) > 1:
            raise AssertionError(f"{func} mixes {sorted(map(str, devices))}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("flash_attn", [True, False], ids=["fast", "explicit"])
@pytest.mark.parametrize("kind", ["dense", "moe, exact", "moe, straight through", "yarn"])
def test_device_clean(flash_attn, kind):
    """Inputs and weights on the CPU, while the default device is meta: what is made without a device is caught."""
    changes = {
        "dense": {},
        "moe, exact": {"use_moe": True, "num_experts_per_tok": 2, "n_shared_experts": 1, "seq_aux": True},
        "moe, straight through": {"use_moe": True, "router_gradient": "straight_through"},
        "yarn": {"rope_scaling": {"factor": 4, "original_max_position_embeddings": 32}},
    }[kind]
    model, ids = tiny_model(flash_attn=flash_attn, **changes).train(), random_ids()
    mask, places = torch.ones(2, 12), torch.tensor([3, 5])
    mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"), OneDevicePerOperation():
        for attention_mask in (None, mask, mask[:, None].expand(2, 12, 12)):
            output = model(ids, attention_mask, labels=labels)
            (output.loss + output.aux_loss).backward()
        with pytest.warns(UserWarning, match="no label"):
            model(ids, labels=torch.full_like(ids, -100))
        first = model(ids[:, :7], mask[:, :7], use_cache=True)
        model(ids[:, 7:], mask, first.past_key_values, use_cache=True).logits.sum().backward()
        model(ids, logits_to_keep=places)
        settings = {"max_new_tokens": 4, "generator": generator, "repetition_penalty": 1.2, "num_return_sequences": 2}
        for use_cache in (True, False):
            out = model.generate(ids, mask, eos_token_id=[5, 6], use_cache=use_cache, **settings)
        model.generate(ids, max_new_tokens=4, do_sample=False)
        rows = trace(model, ids, mask)
    assert out.device == ids.device
    assert len(rows) > 20


def test_the_check_itself_catches():
    x = torch.ones(2, 2)
    with torch.device("meta"), OneDevicePerOperation():
        for fault in (lambda: x @ torch.ones(2, 2), lambda: x + torch.arange(2), lambda: x[torch.tensor([0])]):
            with pytest.raises(AssertionError, match=r"cpu.*meta"):
                fault()


def forbidden(source: str) -> list[int]:
    """Lines that name a device: .cpu(), .cuda(), "cuda", unless the line says why in a `# device:` comment."""
    names, lines = ("cpu", "cuda", "mps"), source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        call = isinstance(node, ast.Attribute) and node.attr in names
        text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in names
        if (call or text) and not any("# device:" in line for line in lines[node.lineno - 1 : node.end_lineno]):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("file", sorted(CORE.rglob("*.py")), ids=lambda file: str(file.relative_to(CORE)))
def test_no_module_names_a_device(file):
    if file.name != "device.py":
        assert forbidden(file.read_text(encoding="utf-8")) == []


def test_the_lint_itself_catches():
    for line in ("x.cpu()", "x.cuda()", "x.to('cuda')", "torch.device('cuda:0')", "torch.zeros(2, device='cpu')"):
        assert forbidden(line) == [1], line
        assert forbidden(line + "  # device: because") == []
    assert forbidden("x.to(y.device)  # cuda") == []


def test_pick_device(monkeypatch):
    monkeypatch.setenv("MINIMIND_DEVICE", "cpu")
    assert pick_device() == torch.device("cpu")
    monkeypatch.setenv("MINIMIND_DEVICE", "tpu")
    with pytest.raises(ValueError, match=r"'tpu'.*auto, cpu, cuda, mps"):
        pick_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MINIMIND_DEVICE", "CUDA")
    with pytest.raises(RuntimeError, match="MINIMIND_DEVICE=cuda"):
        pick_device()
    monkeypatch.delenv("MINIMIND_DEVICE")
    assert pick_device() == torch.device("cpu")  # auto never takes mps
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device() == torch.device("cuda")


def test_random_tensor(monkeypatch):
    monkeypatch.setenv("MINIMIND_DEVICE", "cpu")
    a = random_tensor(300, 50, seed=3, scale=2.0)
    assert a.shape == (300, 50) and a.dtype == torch.float32
    assert a.std().item() == pytest.approx(2.0, rel=0.02)
    assert torch.equal(a, random_tensor(300, 50, seed=3, scale=2.0))
    assert not torch.equal(a, random_tensor(300, 50, seed=4, scale=2.0))
    assert random_tensor(2, dtype=torch.bfloat16).dtype == torch.bfloat16
    state = torch.get_rng_state()
    random_tensor(2)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not touched
    assert random_tensor(2, device=torch.device("meta")).is_meta
