"""The microscope: see every intermediate of a model, and find where two models part."""

import math
import re
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html import escape
from unittest import mock

import torch
from torch import nn

from . import attention
from .generation import evaluating
from .moe import MoEGate

# what the axes of an intermediate mean, by its path; the first match counts
AXES = (
    (r"(q_proj|o_proj\.input)$", "batch seq (heads head_dim)"),
    (r"[kv]_proj$", "batch seq (kv_heads head_dim)"),
    (r"(q_norm|q_rotated)$", "batch seq heads head_dim"),
    (r"(k_norm|k_rotated)$", "batch seq kv_heads head_dim"),
    (r"self_attn\.weights$", "batch heads query key"),
    (r"\.experts\.\d+\.(gate_proj|up_proj|down_proj\.input)$", "tokens intermediate"),
    (r"\.experts\.", "tokens hidden"),
    (r"(gate_proj|up_proj|down_proj\.input)$", "batch seq intermediate"),
    (r"gate\.(topk_idx|topk_weight)$", "batch seq k"),
    (r"gate\.probs$", "batch seq experts"),
    (r"lm_head$", "batch seq vocab"),
)
# modules whose input is worth a row: merged heads, the gated value, the stream between a block's halves
INPUTS_TOO = ("o_proj", "down_proj", "post_attention_layernorm")
HIDDEN = "batch seq hidden"


@dataclass(frozen=True)
class Row:
    """One intermediate: where it comes from, what its axes mean, how large it is."""

    path: str
    axes: str
    shape: tuple[int, ...]
    mean: float
    rms: float
    max: float  # largest absolute value


class Trace(list):
    """The rows of one forward pass, in the order in which they were computed. Shown as a table in a notebook."""

    HEADS = ("module", "axes", "shape", "mean", "rms", "max |x|")

    def only(self, text: str) -> "Trace":
        """The rows whose path contains `text`, such as "layers.0."."""
        return Trace(row for row in self if text in row.path)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.path,
                row.axes,
                "x".join(map(str, row.shape)),
                f"{round(row.mean, 3) + 0.0:.3f}",
                f"{row.rms:.3f}",
                f"{row.max:.3f}",
            )
            for row in self
        ]

    def __repr__(self) -> str:
        cells = [self.HEADS, *self._cells()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.HEADS))]
        align = [str.ljust] * 3 + [str.rjust] * 3
        return "\n".join(
            "  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True)).rstrip()
            for row in cells
        )

    def _repr_html_(self) -> str:
        sides = ["left"] * 3 + ["right"] * 3

        def line(cells, tag: str, scope: str = "") -> str:
            columns = zip(cells, sides, strict=True)
            return "".join(f'<{tag}{scope} style="text-align:{side}">{escape(cell)}</{tag}>' for cell, side in columns)

        head = line(self.HEADS, "th", ' scope="col"')
        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in self._cells())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def trace(model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Trace:
    """Run the model once and describe every intermediate: module path, einops axes, shape, mean, rms, largest |x|.

    input_ids: [batch, seq]. Attention takes its explicit path, so that its weights are seen too. The model is left as
    it was: same mode, no gradients, no hooks.
    """
    rows = Trace()
    for path, value in intermediates(model, input_ids, attention_mask):
        wide = value.detach().float()
        rows.append(
            Row(
                path,
                _axes_of(path, value),
                tuple(value.shape),
                wide.mean().item() if value.numel() else math.nan,
                wide.square().mean().sqrt().item() if value.numel() else math.nan,
                wide.abs().max().item() if value.numel() else math.nan,
            )
        )
    return rows


@dataclass(frozen=True)
class Difference:
    """The first intermediate at which two models part; `path` is None if they agree everywhere."""

    path: str | None
    sentence: str
    largest: float = 0.0

    def __repr__(self) -> str:
        return self.sentence


def first_difference(
    model_a: nn.Module,
    model_b: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    rtol: float = 1e-4,
) -> Difference:
    """Compare two models' intermediates in the order of computation and name the first that differs.

    Two values differ when max |a - b| > rtol * max |a|. Intermediates that only one model has (a reader's own class may
    have other inner modules) are passed over.
    """
    seen_a = dict(intermediates(model_a, input_ids, attention_mask))
    seen_b = dict(intermediates(model_b, input_ids, attention_mask))
    shared = [path for path in seen_a if path in seen_b]
    for path in shared:
        a, b = seen_a[path].float(), seen_b[path].float()
        if a.shape != b.shape:
            return Difference(
                path, f"first difference at {path}: shape {list(a.shape)} against {list(b.shape)}", math.inf
            )
        if not a.numel():
            continue
        largest, scale = (a - b).abs().max().item(), a.abs().max().item()
        if not largest <= rtol * scale:
            return Difference(
                path, f"first difference at {path}: max |a - b| is {largest:.3g}, max |a| is {scale:.3g}", largest
            )
    return Difference(None, f"no difference in {len(shared)} intermediates")


def agree(*, rtol: float = 1e-5, **versions: torch.Tensor) -> bool:
    """Print, for each pair of named tensors, whether they are close and within which power of ten. True if all are.

    Close means max |a - b| <= rtol * max |a|, with rtol raised to 1e-2 for bfloat16 and 2e-3 for float16. The printed
    bound is coarse on purpose: last digits differ between machines. rtol=0 asks for equality to the last bit, which
    holds everywhere for copies and permutations only.
    """
    if len(versions) < 2:
        raise ValueError(f"agree compares at least two versions, not {len(versions)}")
    names, all_close = list(versions), True
    width = max(map(len, names))
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            close, words = _compare(versions[first], versions[second], rtol)
            all_close = all_close and close
            print(f"{first:>{width}} = {second:<{width}}  close: {close}  ({words})")
    return all_close


def _compare(a: torch.Tensor, b: torch.Tensor, rtol: float) -> tuple[bool, str]:
    if a.shape != b.shape:
        return False, f"shapes {list(a.shape)} and {list(b.shape)}"
    if a.dtype != b.dtype:
        return False, f"types {a.dtype} and {b.dtype}"
    whole = not (a.is_floating_point() or a.is_complex())
    if (whole or rtol == 0) and torch.equal(a, b.to(a.device)):
        return True, "exact"
    if whole:
        return False, f"{(a != b.to(a.device)).sum().item()} of {a.numel()} differ"
    rtol = rtol and max(rtol, {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(a.dtype, 0.0))
    a, b = (x.detach().to(a.device, torch.promote_types(x.dtype, torch.float32)) for x in (a, b))
    if not (a.isfinite().all() and b.isfinite().all()):
        return False, "not all finite"
    largest, scale = (a - b).abs().max().item(), a.abs().max().item()
    if largest <= rtol * scale:
        return True, f"within {rtol:.0e} of the largest value"
    return False, f"apart by {largest / scale if scale else math.inf:.2g} of the largest value"


def _axes_of(path: str, value: torch.Tensor) -> str:
    for pattern, axes in AXES:
        if re.search(pattern, path):
            return axes
    return HIDDEN if value.ndim == 3 else " ".join(f"axis{i}" for i in range(value.ndim))


def intermediates(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> list[tuple[str, torch.Tensor]]:
    """The tensors that `trace` describes: (path, value) of every module's output and of the steps inside attention."""
    found: list[tuple[str, torch.Tensor]] = []
    running = [""]  # the attention module that runs now, for its steps that are plain functions

    def keep(path: str, value):
        if isinstance(value, torch.Tensor):
            found.append((path, value.detach().clone()))

    def after(path: str):
        def hook(module, inputs, output):
            if isinstance(module, MoEGate):
                for name, value in zip(("topk_idx", "topk_weight", "probs"), output, strict=True):
                    keep(f"{path}.{name}", value)
            else:
                keep(path, output[0] if isinstance(output, tuple) else output)

        return hook

    def before(path: str):
        def hook(module, inputs):
            if path.endswith("self_attn"):
                running[0] = path
            elif path.endswith(INPUTS_TOO):
                keep(f"{path}.input", inputs[0])

        return hook

    def note(name: str, *labels: str):
        """Keep what a function of attention.py returns, also where a reader's own class calls it as core.name."""
        function = getattr(attention, name)

        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            for label, value in zip(labels, result if isinstance(result, tuple) else (result,), strict=True):
                keep(f"{running[0]}.{label}", value)
            return result

        for home in (attention, sys.modules[__package__]):
            stack.enter_context(mock.patch.object(home, name, call))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if path and not isinstance(module, nn.ModuleList | nn.Dropout):
                stack.callback(module.register_forward_pre_hook(before(path)).remove)
                stack.callback(module.register_forward_hook(after(path)).remove)
        note("apply_rotary_pos_emb", "q_rotated", "k_rotated")
        note("attention_weights", "weights")
        stack.enter_context(_explicit_attention(model))
        stack.enter_context(evaluating(model))
        with torch.no_grad():
            model(input_ids, attention_mask)
    return found


@contextmanager
def _explicit_attention(model: nn.Module):
    modules = [module for module in model.modules() if isinstance(module, attention.Attention)]
    before = [module.flash_attn for module in modules]
    for module in modules:
        module.flash_attn = False
    try:
        yield
    finally:
        for module, flag in zip(modules, before, strict=True):
            module.flash_attn = flag
