"""The model's matrix product: the quick way for few tokens equals PyTorch's linear layer."""

import pytest
import torch
import torch.nn.functional as F
from reference import largest_difference

from minimind_core.linear import FEW, Linear


def layer(dtype=torch.float32) -> Linear:
    torch.manual_seed(0)
    return Linear(48, 80).to(dtype)


SHAPES = [(48,), (1, 48), (1, 1, 48), (3, 1, 48), (1, FEW, 48), (2, FEW - 1, 48), (0, 48), (2, 0, 48)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equals_pytorch(shape, dtype):
    linear, x = layer(dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        quick = linear(x)
    assert quick.dtype == dtype
    assert quick.shape == (*shape[:-1], 80)
    assert not quick.numel() or largest_difference(quick, F.linear(x, linear.weight)) < 1e-6


def test_the_quick_way_is_taken(monkeypatch):
    def refuse(*_):
        raise AssertionError("F.linear was called")

    monkeypatch.setattr(F, "linear", refuse)
    with torch.no_grad():
        layer()(torch.randn(1, 1, 48))
        with pytest.raises(AssertionError):
            layer()(torch.randn(1, FEW + 1, 48))
    with pytest.raises(AssertionError):
        layer()(torch.randn(1, 1, 48))  # with gradients


def test_views_of_other_tensors():
    linear, wide = layer(), torch.randn(2, 48, 3)
    with torch.inference_mode():
        assert largest_difference(linear(wide.transpose(1, 2)[:, :2]), F.linear(wide.mT[:, :2], linear.weight)) < 1e-6


def test_gradients_are_pytorchs():
    linear, x = layer(), torch.randn(1, 1, 48, requires_grad=True)
    linear(x).square().sum().backward()
    y = x.detach() @ linear.weight.T
    assert torch.allclose(linear.weight.grad, 2 * y[0].T @ x.detach()[0], atol=1e-5)
    assert torch.allclose(x.grad, 2 * y @ linear.weight, atol=1e-5)


def test_autocast_gives_half_precision():
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer()(torch.randn(1, 48)).dtype == torch.bfloat16
