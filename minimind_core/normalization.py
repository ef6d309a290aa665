"""RMSNorm: divide a vector by its root mean square, then scale each feature."""

import torch
from torch import nn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, cast: str = "after_weight") -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    x: [..., dim], any float type; weight: [dim]. Returns [..., dim] in x's type.
    The arithmetic is float32 (float64 for float64 input), rounded once at the end. cast="before_weight" rounds
    before the product with the weight, as MiniMind-2, Llama and Hugging Face do.
    Raises ValueError if the last axis and the weight differ in size, TypeError for whole numbers.
    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(
            f"x has {x.shape[-1] if x.ndim else 0} features, but the weight is of shape {list(weight.shape)}"
        )
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; a norm needs a float type, such as x.float()")
    wide = x if x.dtype == torch.float64 else x.float()
    unit = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if cast == "before_weight":
        return (weight * unit.to(x.dtype)).to(x.dtype)
    return (weight * unit).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a learned weight [dim], at first all ones. No bias, no mean subtraction."""

    def __init__(self, dim: int, eps: float = 1e-6, cast: str = "after_weight"):
        super().__init__()
        self.eps, self.cast = eps, cast
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.cast)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
