"""rms_norm and RMSNorm, against torch.nn.RMSNorm and by hand."""

import pytest
import torch
from reference import largest_difference

from minimind_core import RMSNorm, rms_norm

GENERATOR = torch.Generator().manual_seed(0)
X, WEIGHT = torch.randn(3, 5, 64, generator=GENERATOR), torch.randn(64, generator=GENERATOR)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_equals_torch_bit_for_bit(dtype, scale):
    theirs, ours = torch.nn.RMSNorm(64, eps=1e-6, dtype=dtype), RMSNorm(64, eps=1e-6).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(WEIGHT)
        ours.weight.copy_(WEIGHT)
    x = (X * min(scale, 1e3 if dtype == torch.float16 else scale)).to(dtype)
    assert ours(x).dtype == dtype
    assert torch.equal(ours(x), theirs(x))


def test_by_hand():
    x = torch.tensor([3.0, 4.0])
    assert torch.allclose(rms_norm(x, torch.tensor([1.0, 2.0]), eps=0.0), torch.tensor([3.0, 8.0]) / 12.5**0.5)
    tiny = rms_norm(torch.tensor([1e-3, 1e-3]), torch.ones(2), eps=1e-6)  # eps is inside the root
    assert torch.allclose(tiny, torch.full((2,), 0.5**0.5))


def test_no_mean_is_subtracted_and_scale_does_not_matter():
    shifted = rms_norm(X + 5, WEIGHT, eps=1e-6)
    assert largest_difference(shifted, rms_norm(X, WEIGHT, eps=1e-6)) > 0.1
    assert largest_difference(rms_norm(1000 * X, WEIGHT, 1e-6), rms_norm(X, WEIGHT, 1e-6)) < 1e-5


def test_one_rounding_at_the_end():
    """fp32 weight, half-precision x: the output keeps x's type, and its error is that of a single rounding."""
    x = X.bfloat16()
    exact = rms_norm(x.double(), WEIGHT.double(), 1e-6)
    after, before = (rms_norm(x, WEIGHT, 1e-6, cast) for cast in ("after_weight", "before_weight"))
    assert after.dtype == before.dtype == torch.bfloat16
    assert torch.equal(after, exact.float().bfloat16())
    assert not torch.equal(after, before)
    error = [(value.double() - exact).abs().mean() for value in (after, before)]
    assert error[0] < 0.9 * error[1]


def test_before_weight_is_what_llama_does():
    x, weight = X.bfloat16(), WEIGHT.bfloat16()
    unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5, "before_weight"), weight * unit.to(torch.bfloat16))


def test_squares_do_not_overflow_in_half_precision():
    x = torch.full((1, 8), 60000.0).half()
    assert torch.equal(rms_norm(x, torch.ones(8).half()), torch.ones(1, 8).half())


def test_gradients_are_torchs():
    x, weight = X.double().requires_grad_(), WEIGHT.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x[:1, :2], weight))


def test_module_uses_its_eps():
    x = 1e-3 * X
    assert largest_difference(RMSNorm(64, eps=1e-2)(x), RMSNorm(64)(x)) > 0.5
    assert "64, eps=0.01" in repr(RMSNorm(64, eps=1e-2))


def test_wrong_inputs():
    with pytest.raises(ValueError, match=r"64 features.*\[32\]"):
        rms_norm(X, torch.ones(32))
    with pytest.raises(TypeError, match="int64"):
        rms_norm(torch.arange(64), WEIGHT)
