"""The language-model loss: each position predicts the next token."""

import warnings

import torch
import torch.nn.functional as F
from einops import rearrange

IGNORED = -100  # the label of a token that is not to be learned


def shifted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = IGNORED) -> torch.Tensor:
    """Mean of -log p(next token) over the positions whose next token is labeled. The one and only shift is here.

    logits: [batch, seq, vocab]; labels: [batch, seq], the token ids themselves, unshifted; ignore_index marks
    tokens that are not to be learned. Arithmetic in float32. With nothing to predict it warns and returns a zero
    that is part of the graph. Raises ValueError for shapes that differ and labels outside the vocabulary.
    Source: MiniMind, MiniMindForCausalLM.forward.
    """
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits are {list(logits.shape)}, labels {list(labels.shape)}; both need the same batch and seq"
        )
    # position t predicts t + 1; the last predicts nothing
    targets = F.pad(labels[:, 1:].long(), (0, 1), value=ignore_index)
    counted = targets != ignore_index
    if not counted.any():
        warnings.warn("no label to predict in this batch: the loss is 0 and teaches nothing", stacklevel=2)
        return logits[..., :0].sum(dtype=torch.promote_types(logits.dtype, torch.float32))
    wrong = counted & ((targets < 0) | (targets >= logits.shape[-1]))
    if wrong.any():
        raise ValueError(
            f"label {targets[wrong][0].item()} is outside the vocabulary of {logits.shape[-1]} tokens "
            f"(ignore_index is {ignore_index})"
        )
    flat = rearrange(logits, "batch seq vocab -> (batch seq) vocab")
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    return F.cross_entropy(flat, rearrange(targets, "batch seq -> (batch seq)"), ignore_index=ignore_index)
