"""SwiGLU: a gate decides, feature by feature, how much of a value passes."""

import torch
from torch import nn

from .config import ACTIVATIONS, MiniMindConfig
from .linear import Linear


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)): [batch, seq, hidden] -> [batch, seq, hidden], no biases.

    intermediate_size: width inside, the config's unless given.
    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self, config: MiniMindConfig, intermediate_size: int | None = None):
        super().__init__()
        hidden, inside = config.hidden_size, intermediate_size or config.intermediate_size
        self.gate_proj = Linear(hidden, inside)
        self.up_proj = Linear(hidden, inside)
        self.down_proj = Linear(inside, hidden)
        self.act_fn = ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
