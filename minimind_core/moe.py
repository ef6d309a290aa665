"""Mixture of experts: a router sends each token to k of E feed-forwards."""

import math
import warnings

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import nn

from .config import MiniMindConfig
from .feed_forward import FeedForward


def load_balancing_loss(
    probs: torch.Tensor, topk_idx: torch.Tensor, token_mask: torch.Tensor | None = None, level: str = "batch"
) -> torch.Tensor:
    """E * sum over experts of f * P: 1 at perfect balance for every k, up to E when one expert gets everything.

    probs: [batch, seq, experts], the router's softmax; topk_idx: [batch, seq, k], the chosen experts; token_mask:
    [batch, seq], 0 or False for tokens that do not count. f is the share of assignments that an expert gets (no
    gradient), P its mean probability. level "sequence": the same for each sequence, then the mean. No coefficient.
    Raises ValueError for another level and for a token_mask of another shape.
    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, with f divided by k.
    """
    if level not in ("batch", "sequence"):
        raise ValueError(f"level is {level!r}; choose batch or sequence")
    if token_mask is not None and token_mask.shape != probs.shape[:-1]:
        raise ValueError(f"token_mask is {list(token_mask.shape)}, but the tokens are {list(probs.shape[:-1])}")
    experts, k = probs.shape[-1], topk_idx.shape[-1]
    chosen = torch.zeros_like(probs).scatter(-1, topk_idx, 1.0)
    counts = torch.ones_like(probs[..., :1]) if token_mask is None else rearrange(token_mask, "... -> ... 1").to(probs)
    pattern = "batch seq experts -> 1 experts" if level == "batch" else "batch seq experts -> batch experts"
    total = reduce(counts, pattern, "sum")
    f = reduce(chosen * counts, pattern, "sum") / (k * total.clamp(min=1))
    p = reduce(probs * counts, pattern, "sum") / total.clamp(min=1)
    per_sequence = experts * (f * p).sum(dim=-1)
    return per_sequence.sum() / (total > 0).sum().clamp(min=1)


class MoEGate(nn.Module):
    """The router: softmax over experts, the k most probable, their weights rescaled to sum 1 if norm_topk_prob.

    Source: MiniMind, MoEGate (MiniMind-2) and MOEFeedForward.gate (MiniMind-3).
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.straight_through = config.router_gradient == "straight_through"
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.reset_parameters()
        self._warned = False

    def reset_parameters(self):
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(
        self, x: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [batch, seq, hidden] -> topk_idx, topk_weight, both [batch, seq, k], and probs [batch, seq, experts].

        Weights and probabilities are float32. Masked tokens are routed too; the mask matters to the load only.
        """
        logits = F.linear(x, self.weight)
        probs = logits.softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        topk_weight, topk_idx = probs.topk(self.k, dim=-1)
        if self.norm_topk_prob and self.k == 1:
            # p / p is 1 whatever the router says, so its exact gradient is 0
            self._warn_once()
            topk_weight = topk_weight / (topk_weight.detach() if self.straight_through else topk_weight)
        elif self.norm_topk_prob:
            topk_weight = topk_weight / topk_weight.sum(dim=-1, keepdim=True)
        return topk_idx, topk_weight, probs

    def _warn_once(self):
        trained = self.training and torch.is_grad_enabled() and self.weight.requires_grad
        if trained and not self.straight_through and not self._warned:
            self._warned = True
            warnings.warn(
                "the language-model loss gives this router no gradient: with num_experts_per_tok=1 and "
                "norm_topk_prob=True its weight is p / p = 1; train with "
                'router_gradient="straight_through" (same outputs)',
                stacklevel=3,
            )


class MOEFeedForward(nn.Module):
    """E feed-forwards of which each token uses k: [batch, seq, hidden] -> [batch, seq, hidden].

    After a call `aux_loss` holds the load-balancing loss times its coefficient. `expert`: the class of the experts,
    called as expert(config, intermediate_size).
    """

    def __init__(self, config: MiniMindConfig, expert: type[nn.Module] = FeedForward):
        super().__init__()
        self.k, self.coefficient = config.num_experts_per_tok, config.router_aux_loss_coef
        self.level = "sequence" if config.seq_aux else "batch"
        self.gate = MoEGate(config)
        self.experts = nn.ModuleList(expert(config, config.moe_intermediate_size) for _ in range(config.num_experts))
        if config.n_shared_experts:
            self.shared_experts = nn.ModuleList(
                expert(config, config.moe_intermediate_size) for _ in range(config.n_shared_experts)
            )
        self.aux_loss = None

    def forward(self, x: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        topk_idx, topk_weight, probs = self.gate(x, token_mask)
        self.aux_loss = self.coefficient * load_balancing_loss(probs, topk_idx, token_mask, self.level)
        tokens = rearrange(x, "batch seq hidden -> (batch seq) hidden")
        output = self._dispatch(tokens, topk_idx.flatten(), topk_weight.flatten())
        output = rearrange(output, "(batch seq) hidden -> batch seq hidden", batch=x.shape[0], seq=x.shape[1])
        for shared in getattr(self, "shared_experts", ()):
            output = output + shared(x)
        return output

    def _dispatch(self, tokens: torch.Tensor, expert_idx: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Sort the tokens' assignments by expert, run each expert on its slice, add the results back with weights."""
        order = expert_idx.argsort(stable=True)
        token = order // self.k  # assignments 0 .. k-1 are token 0's
        sizes = expert_idx.bincount(minlength=len(self.experts)).tolist()  # waits for the device: once, not per expert
        slices = tokens[token].split(sizes)
        # With gradients an idle expert runs on its empty slice: its gradient is 0, not missing, and no value of its
        # weights, not even inf, can reach a token.
        keep_idle = torch.is_grad_enabled() or not len(tokens)
        outputs = [expert(part) for expert, part in zip(self.experts, slices, strict=True) if keep_idle or len(part)]
        weighted = torch.cat(outputs) * rearrange(weight[order], "assignment -> assignment 1").to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, token, weighted)

    def __getstate__(self):
        return {**self.__dict__, "aux_loss": None}  # the graph of the last call is not part of a copy
