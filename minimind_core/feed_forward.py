"""SwiGLU: a gate decides, feature by feature, how much of a value passes."""

import torch
import torch.nn.functional as F
from torch import nn

from .config import MiniMindConfig

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)): [batch, seq, hidden] -> [batch, seq, hidden], no biases.

    intermediate_size: width inside, the config's unless given.
    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self, config: MiniMindConfig, intermediate_size: int | None = None):
        super().__init__()
        hidden, inside = config.hidden_size, intermediate_size or config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inside, bias=False)
        self.up_proj = nn.Linear(hidden, inside, bias=False)
        self.down_proj = nn.Linear(inside, hidden, bias=False)
        self.act_fn = ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
