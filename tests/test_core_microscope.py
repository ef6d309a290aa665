"""The microscope: every intermediate with its axes, the first difference, and agreement within a power of ten."""

import copy
import math
import re

import pytest
import torch
from reference import random_ids, tiny_config, tiny_model

import minimind_core as core
from minimind_core import Attention, FeedForward, MiniMindForCausalLM, RMSNorm, agree, first_difference, trace

KINDS = {
    "dense": {},
    "no qk_norm": {"qk_norm": False},
    "moe": {"use_moe": True, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
SIZES = {
    "batch": 2,
    "seq": 12,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 96,
    "vocab": 97,
    "query": 12,
    "key": 12,
    "experts": 4,
    "k": 2,
}


def expected_shape(axes: str, shape: tuple[int, ...]) -> list[int]:
    """The sizes that the axes stand for, (heads head_dim) being one axis; the number of tokens is free."""
    groups = re.findall(r"\(.*?\)|\w+", axes)
    sizes = {**SIZES, "tokens": shape[0]}
    return [math.prod(sizes[word] for word in group.strip("()").split()) for group in groups]


@pytest.mark.parametrize("kind", KINDS)
def test_axes_and_shapes_of_every_row_agree(kind):
    rows = trace(tiny_model(**KINDS[kind]), random_ids())
    assert len({row.path for row in rows}) == len(rows)
    for row in rows:
        assert expected_shape(row.axes, row.shape) == list(row.shape), row


def test_rows_in_the_order_of_computation():
    rows = trace(tiny_model(), random_ids())
    first = [row.path.removeprefix("model.layers.0.") for row in rows.only("layers.0")]
    assert first == [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "self_attn.q_rotated",
        "self_attn.k_rotated",
        "self_attn.weights",
        "self_attn.o_proj.input",
        "self_attn.o_proj",
        "self_attn",
        "post_attention_layernorm.input",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj.input",
        "mlp.down_proj",
        "mlp",
        "model.layers.0",
    ]
    assert rows[0].path == "model.embed_tokens" and rows[-1].path == "lm_head"


def test_numbers_are_those_of_the_tensors():
    model, ids = tiny_model(), random_ids()
    row = trace(model, ids)[-1]
    logits = model(ids).logits
    assert row.mean == pytest.approx(logits.mean().item(), abs=1e-5)
    assert row.rms == pytest.approx(logits.square().mean().sqrt().item(), rel=1e-5)
    assert row.max == pytest.approx(logits.abs().max().item(), rel=1e-5)
    weights = trace(model, ids).only("layers.1.self_attn.weights")[0]
    assert weights.shape == (2, 4, 12, 12) and weights.mean == pytest.approx(1 / 12)
    assert weights.max == pytest.approx(1.0)  # the first position sees only itself


def test_table():
    rows = trace(tiny_model(), random_ids()).only("lm_head")
    lines = repr(rows).splitlines()
    assert len(lines) == 2 and lines[0].split()[0] == "module"
    assert "lm_head  batch seq vocab  2x12x97" in lines[1]
    assert "-0.000" not in repr(trace(tiny_model(), random_ids()))
    html = rows._repr_html_()
    assert html.count("<tr>") == 2 and ">batch seq vocab<" in html and html.count('scope="col"') == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(kind, fails):
    model, ids = tiny_model(**KINDS[kind]).train(), random_ids()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    if fails:
        with pytest.raises(ValueError):
            trace(model, ids + 90)
    else:
        trace(model, ids)
    assert [module.training for module in model.modules()] == modes
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(block.self_attn.flash_attn for block in model.model.layers)
    assert torch.is_grad_enabled()
    import minimind_core.attention as attention

    assert attention.attention_weights.__module__ == attention.__name__  # the watched functions are themselves again


def test_masks_half_precision_and_parts():
    mask = torch.ones(2, 12)
    mask[0, :4] = 0
    weights = trace(tiny_model(), random_ids(), mask).only("weights")
    assert len(weights) == 2
    assert all(math.isfinite(row.rms) for row in trace(tiny_model().half(), random_ids()))
    assert trace(tiny_model().model, random_ids())[-1].path == "norm"  # a model without a head


# ---------------------------------------------------------------- first difference


def test_no_difference():
    found = first_difference(tiny_model(), tiny_model(), random_ids())
    assert found.path is None
    assert repr(found).startswith("no difference in ")
    assert first_difference(tiny_model(), tiny_model(flash_attn=False), random_ids()).path is None


@pytest.mark.parametrize(
    ("weight", "path"),
    [
        ("model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm"),
        ("model.layers.0.self_attn.k_norm.weight", "model.layers.0.self_attn.k_norm"),
        ("model.layers.1.self_attn.v_proj.weight", "model.layers.1.self_attn.v_proj"),
        ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj"),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj"),
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj"),
        ("model.norm.weight", "model.norm"),
    ],
)
def test_names_the_weight_that_was_changed(weight, path):
    model, changed = tiny_model(), tiny_model()
    with torch.no_grad():
        changed.get_parameter(weight).mul_(1.01)
    found = first_difference(model, changed, random_ids())
    assert found.path == path
    assert path in repr(found) and found.largest > 0


def test_names_the_gate_of_a_mixture():
    model, changed = (tiny_model(use_moe=True, num_experts_per_tok=2) for _ in range(2))
    with torch.no_grad():
        changed.model.layers[1].mlp.gate.weight.mul_(1.01)
    assert first_difference(model, changed, random_ids()).path.startswith("model.layers.1.mlp.gate.")


class SumNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) * 1.01


class NoScale(Attention):
    def forward(self, x, *rest):
        output, past = super().forward(x, *rest)
        return output * 1.01, past


class Swapped(FeedForward):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


@pytest.mark.parametrize(
    ("parts", "path"),
    [
        ({"norm": SumNorm}, "model.layers.0.input_layernorm"),
        ({"attention": NoScale}, "model.layers.0.self_attn"),
        ({"feed_forward": Swapped}, "model.layers.0.mlp.down_proj.input"),
    ],
)
def test_names_the_part_that_was_planted(parts, path):
    assert first_difference(tiny_model(), tiny_model(parts=parts), random_ids()).path == path


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"rope_theta": 1e4}, "model.layers.0.self_attn.q_rotated"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj"),
    ],
)
def test_names_the_step_inside_attention(changes, path):
    model = tiny_model()
    other = MiniMindForCausalLM(tiny_config(**changes)).eval()
    if "rope_theta" in changes:
        other.load_state_dict(model.state_dict())
    else:
        for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"):
            other.get_parameter(name).data.copy_(model.get_parameter(name))
        other.model.layers[0].self_attn.q_proj.load_state_dict(model.model.layers[0].self_attn.q_proj.state_dict())
    found = first_difference(model, other, random_ids())
    assert found.path == path
    if "num_key_value_heads" in changes:
        assert "[2, 12, 32] against [2, 12, 64]" in repr(found)


class Own(torch.nn.Module):
    """A class of a reader's own: projections with the core's names, steps that are `core.` functions or plain torch."""

    wrong_angle = wrong_scale = 1.0

    def __init__(self, config):
        super().__init__()
        self.config = config
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = torch.nn.Linear(config.hidden_size, heads * size, bias=False)
        self.k_proj = torch.nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.v_proj = torch.nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = torch.nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(size, eps=config.rms_norm_eps)

    def forward(self, x, position_embeddings, past_key_value=None, use_cache=False, attention_mask=None):
        def split(y):
            return y.unflatten(-1, (-1, self.config.head_dim))

        q, k, v = self.q_norm(split(self.q_proj(x))), self.k_norm(split(self.k_proj(x))), split(self.v_proj(x))
        cos, sin = position_embeddings
        q, k = core.apply_rotary_pos_emb(q, k, cos, self.wrong_angle * sin)
        k, v = (y.repeat_interleave(q.shape[2] // y.shape[2], dim=2) for y in (k, v))
        allowed = core.allowed_keys(q.shape[1], k.shape[1], attention_mask)
        weights = core.attention_weights(q * self.wrong_scale, k, allowed)
        output = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.o_proj(output.flatten(2)), None


@pytest.mark.parametrize(
    ("wrong", "path"),
    [({}, None), ({"wrong_angle": 0.5}, "q_rotated"), ({"wrong_scale": 0.5}, "weights")],
)
def test_looks_into_a_class_of_the_readers_own(wrong, path):
    model, other = tiny_model(), tiny_model(parts={"attention": type("Wrong", (Own,), wrong)})
    other.load_state_dict(model.state_dict())
    found = first_difference(model, other, random_ids())
    assert found.path == (path and f"model.layers.0.self_attn.{path}"), found


def test_nan_is_a_difference():
    model, broken = tiny_model(), copy.deepcopy(tiny_model())
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    assert first_difference(model, broken, random_ids()).path == "model.layers.1.mlp.up_proj"


# ---------------------------------------------------------------- agree


def test_agree(capsys):
    a = torch.tensor([1.0, 2.0, 4.0])
    assert agree(loops=a, core=a.clone(), torch=a + 1e-6) is True
    assert capsys.readouterr().out.splitlines() == [
        "loops = core   close: True  (within 1e-05 of the largest value)",
        "loops = torch  close: True  (within 1e-05 of the largest value)",
        " core = torch  close: True  (within 1e-05 of the largest value)",
    ]
    assert agree(rtol=0, a=a, b=a.clone()) is True
    assert capsys.readouterr().out == "a = b  close: True  (exact)\n"
    assert agree(rtol=0, a=a, b=a + 1e-6) is False
    assert "close: False" in capsys.readouterr().out
    assert agree(a=a, b=a + 0.4) is False
    assert capsys.readouterr().out == "a = b  close: False  (apart by 0.1 of the largest value)\n"


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.zeros(2), torch.zeros(3), "shapes [2] and [3]"),
        (torch.zeros(2), torch.zeros(2).half(), "types torch.float32 and torch.float16"),
        (torch.tensor([math.nan]), torch.tensor([1.0]), "not all finite"),
        (torch.zeros(2), torch.ones(2), "apart by inf"),
        (torch.tensor([2**24]), torch.tensor([2**24 + 1]), "1 of 1 differ"),
        (torch.tensor([True, False]), torch.tensor([True, True]), "1 of 2 differ"),
    ],
)
def test_what_does_not_agree(a, b, words, capsys):
    assert agree(a=a, b=b) is False
    assert words in capsys.readouterr().out


def test_half_precision_is_compared_by_its_own_digits(capsys):
    a = torch.ones(2)
    assert agree(a=a.bfloat16(), b=(a * 1.006).bfloat16())
    assert agree(a=a.half(), b=(a * 1.001).half())
    assert not agree(a=a, b=a * 1.001)
    assert agree(a=a, b=a * 1.001, rtol=1e-2)
    with pytest.raises(ValueError, match="at least two versions, not 1"):
        agree(a=a)
