"""The whole model: first loss, tied ends, meta device, copies, parts, autocast, checkpointing, and refusals."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from reference import gradients, largest_difference, random_ids, tiny_config, tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from minimind_core import FeedForward, MiniMindConfig, MiniMindForCausalLM, RMSNorm, precompute_freqs_cis
from minimind_core.attention import Attention
from minimind_core.model import MiniMindBlock

KINDS = pytest.mark.parametrize("kind", [{}, {"use_moe": True, "num_experts_per_tok": 2}], ids=["dense", "moe"])


# ---------------------------------------------------------------- the numbers


def test_first_loss_of_the_real_model():
    """ln V + hidden * 0.02^2 / 2 on random targets: logits of an untrained model are N(0, hidden * 0.02^2)."""
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(max_position_embeddings=64))
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(6400, (2, 4, 32), generator=generator)
    with torch.no_grad():
        logits = model(ids).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(math.log(6400) + 768 * 0.02**2 / 2, abs=0.15)
    assert math.log(6400) + 768 * 0.02**2 / 2 == pytest.approx(8.92, abs=0.005)


def test_initialization():
    torch.manual_seed(0)
    model = MiniMindForCausalLM(tiny_config(initializer_range=0.05, use_moe=True))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.2), name
            assert abs(parameter.mean().item()) < 0.02, name


def test_shapes_and_outputs():
    model, ids = tiny_model(), random_ids()
    output = model(ids, use_cache=True)
    assert output.logits.shape == (2, 12, 97)
    assert output.hidden_states.shape == (2, 12, 64)
    assert torch.equal(output.logits, model.lm_head(output.hidden_states))
    assert output.loss is None and output.aux_loss.item() == 0
    assert len(output.past_key_values) == 2
    hidden, past, aux = model.model(ids)
    assert torch.equal(hidden, output.hidden_states) and past is None and aux.item() == 0


def test_block_by_hand():
    model, x = tiny_model(), torch.randn(2, 5, 64)
    block, tables = model.model.layers[0], precompute_freqs_cis(16, 5, 1e6)
    middle = x + block.self_attn(block.input_layernorm(x), tables)[0]
    wanted = middle + block.mlp(block.post_attention_layernorm(middle))
    assert largest_difference(block(x, tables)[0], wanted) < 1e-6
    kept = x.clone()
    block(x, tables)
    assert torch.equal(x, kept)  # out of place


def test_logits_to_keep():
    model, ids = tiny_model(), random_ids()
    full = model(ids).logits
    assert largest_difference(model(ids, logits_to_keep=3).logits, full[:, -3:]) < 1e-6
    assert model(ids, logits_to_keep=99).logits.shape == full.shape
    places = torch.tensor([0, 5, 11])
    assert largest_difference(model(ids, logits_to_keep=places).logits, full[:, places]) < 1e-6


def test_loss_excludes_aux_loss_and_both_have_gradients():
    model, ids = tiny_model(use_moe=True, num_experts_per_tok=2, router_aux_loss_coef=10.0), random_ids()
    output = model(ids, labels=ids)
    plain = nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(plain.item(), rel=1e-5)
    router = model.model.layers[0].mlp.gate.weight
    (with_aux,) = torch.autograd.grad(output.loss + output.aux_loss, router, retain_graph=True)
    (without,) = torch.autograd.grad(output.loss, router)
    assert largest_difference(with_aux, without) > 0.01


# ---------------------------------------------------------------- tied ends


def test_tied_embedding_is_one_parameter_with_two_gradients():
    model, ids = tiny_model(), random_ids()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = tiny_model(tie_word_embeddings=False)
    untied.load_state_dict(model.state_dict())
    for each in (model, untied):
        each(ids, labels=ids).loss.backward()
    ends = untied.model.embed_tokens.weight.grad, untied.lm_head.weight.grad
    assert all(grad.abs().max() > 0 for grad in ends)
    assert largest_difference(model.lm_head.weight.grad, sum(ends)) < 1e-5


def is_tied(model) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


def test_saved_once_and_tied_again(tmp_path):
    from safetensors.torch import load_model, save_model

    model, ids = tiny_model(), random_ids()
    file = tmp_path / "model.safetensors"
    save_model(model, str(file))
    once = sum(parameter.numel() for parameter in model.parameters())
    assert 4 * once < file.stat().st_size < 4 * once + 10_000
    other = tiny_model(seed=1)
    load_model(other, str(file))
    assert is_tied(other)
    assert torch.equal(other(ids).logits, model(ids).logits)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = tiny_model(seed=1)
    other.load_state_dict(torch.load(buffer))
    assert is_tied(other)
    assert torch.equal(other(ids).logits, model(ids).logits)


def test_two_ends_that_differ_do_not_load_into_one():
    state = tiny_model(tie_word_embeddings=False).state_dict()
    with pytest.raises(ValueError, match="tie_word_embeddings=False"):
        tiny_model().load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half(),
        lambda model: model.to("cpu"),
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
)
@KINDS
def test_copies_and_moves_keep_the_tie_and_the_tables(change, kind):
    model, ids = tiny_model(**kind), random_ids()
    tables = model.model.freqs_cos.clone(), model.model.freqs_sin.clone()
    wanted = model(ids, labels=ids).logits  # a forward pass before: its graph must not be in the way
    changed = change(model)
    assert is_tied(changed)
    assert changed.model.freqs_cos.dtype == torch.float32
    assert torch.equal(changed.model.freqs_cos, tables[0]) and torch.equal(changed.model.freqs_sin, tables[1])
    assert changed(ids).logits.float().isfinite().all()
    if changed.lm_head.weight.dtype == torch.float32:
        assert torch.equal(changed(ids).logits, wanted)


# ---------------------------------------------------------------- the meta device


def build_on_meta(**changes) -> MiniMindForCausalLM:
    with torch.device("meta"):
        model = MiniMindForCausalLM(tiny_config(**changes))
    assert model.model.freqs_cos.is_meta
    return model


@pytest.mark.parametrize("kind", [{}, {"use_moe": True, "num_experts_per_tok": 2, "gate_init": "kaiming_uniform"}])
def test_to_empty_and_init_weights(kind):
    model = build_on_meta(**kind)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)  # what empty memory may hold
    model.init_weights()
    assert is_tied(model)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all((parameter == 1).all() for name, parameter in model.named_parameters() if "norm" in name)
    assert torch.equal(model.model.freqs_cos, tiny_model().model.freqs_cos)
    torch.manual_seed(0)
    model.init_weights()
    torch.manual_seed(0)
    built = MiniMindForCausalLM(tiny_config(**kind))
    built.init_weights()
    assert model(random_ids()).logits.shape == built(random_ids()).logits.shape


@pytest.mark.parametrize("inference_first", [False, True])
def test_load_with_assign(inference_first):
    source, ids = tiny_model(), random_ids()
    model = build_on_meta()
    model.load_state_dict(source.state_dict(), assign=True)
    assert is_tied(model) and not model.model.freqs_cos.is_meta
    model.to("cpu")  # nothing is left on meta that could not be moved
    if inference_first:  # tables that are made while generating must serve training later
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, source(ids).logits)
    model(ids, labels=ids).loss.backward()
    source(ids, labels=ids).loss.backward()
    assert torch.equal(model.model.freqs_sin, source.model.freqs_sin)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, source.get_parameter(name).grad)


def test_to_empty_of_a_real_model_keeps_the_tables():
    model = tiny_model().to_empty(device="cpu")
    assert torch.equal(model.model.freqs_cos, tiny_model().model.freqs_cos)


def test_forward_on_meta():
    model = build_on_meta(use_moe=False)
    assert model(torch.empty(2, 12, dtype=torch.long, device="meta")).logits.shape == (2, 12, 97)


# ---------------------------------------------------------------- a reader's own parts


class MyNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.inner = RMSNorm(dim, eps=eps)

    def forward(self, x):
        return self.inner(x)


class MyAttention(Attention):
    pass


class MyFeedForward(FeedForward):
    pass


@KINDS
@pytest.mark.parametrize("flash_attn", [True, False])
def test_own_parts_run_and_give_the_same(kind, flash_attn):
    parts = {"norm": MyNorm, "attention": MyAttention, "feed_forward": MyFeedForward}
    model, ids = tiny_model(flash_attn=flash_attn, **kind), random_ids()
    mine = MiniMindForCausalLM(model.config, parts=parts).eval()
    block = mine.model.layers[0]
    assert isinstance(block.self_attn, MyAttention) and isinstance(block.input_layernorm, MyNorm)
    assert isinstance(block.mlp.experts[0] if kind else block.mlp, MyFeedForward)
    only_norm = MiniMindForCausalLM(model.config, parts={"norm": MyNorm})
    assert isinstance(only_norm.model.layers[0].self_attn.q_norm, MyNorm)
    with torch.no_grad():
        for target, source in zip(mine.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    found = mine(ids, labels=ids, use_cache=True)
    assert torch.equal(found.logits, model(ids).logits)
    found.loss.backward()
    gradients(mine)
    assert mine.generate(ids, max_new_tokens=3).shape[0] == 2


def test_own_part_in_one_block_and_unknown_parts():
    block = MiniMindBlock(0, tiny_config(), parts={"feed_forward": MyFeedForward})
    assert isinstance(block.mlp, MyFeedForward)
    with pytest.raises(ValueError, match="ffn"):
        MiniMindForCausalLM(tiny_config(), parts={"ffn": MyFeedForward})


def test_before_weight_cast_reaches_every_norm():
    model = tiny_model(rms_norm_cast="before_weight")
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 2 * 4 + 1
    assert all(norm.cast == "before_weight" and norm.eps == model.config.rms_norm_eps for norm in norms)
    eps = tiny_model(rms_norm_eps=1e-3)
    assert all(norm.eps == 1e-3 for norm in eps.modules() if isinstance(norm, RMSNorm))


def test_dropout_places_of_minimind_2():
    model = tiny_model(dropout=0.5, ffn_dropout=True)
    assert model.model.layers[0].mlp_dropout.p == 0.5
    assert tiny_model(dropout=0.5).model.layers[0].mlp_dropout.p == 0.0
    ids = random_ids()
    assert not torch.equal(model.train()(ids).logits, model(ids).logits)
    assert torch.equal(model.eval()(ids).logits, model(ids).logits)


# ---------------------------------------------------------------- how it is used


@KINDS
@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(kind, flash_attn, dtype):
    model, ids = tiny_model(flash_attn=flash_attn, **kind), random_ids()
    wanted = model(ids, labels=ids).loss.item()
    mask = torch.ones(2, 12)
    mask[0, :3] = 0
    with torch.autocast("cpu", dtype=dtype):
        output = model(ids, labels=ids)
        assert output.logits.dtype == dtype
        assert model.generate(ids, mask, max_new_tokens=3).shape[0] == 2
    (output.loss + output.aux_loss).backward()
    assert output.loss.item() == pytest.approx(wanted, rel=0.02)
    assert all(grad.isfinite().all() and grad.dtype == torch.float32 for grad in gradients(model).values())


@KINDS
def test_gradient_checkpointing(kind):
    plain, saving, ids = tiny_model(**kind), tiny_model(**kind), random_ids()
    for block in saving.model.layers:
        forward = block.forward
        block.forward = lambda *inputs, forward=forward: checkpoint(forward, *inputs, use_reentrant=False)
    for model in (plain, saving):
        output = model(ids, labels=ids)
        (output.loss + output.aux_loss).backward()
    for name, grad in gradients(saving).items():
        assert largest_difference(grad, plain.get_parameter(name).grad) < 1e-6


@KINDS
def test_a_few_steps_of_training_learn_a_sequence_by_heart(kind):
    torch.manual_seed(0)
    model, ids = MiniMindForCausalLM(tiny_config(**kind)), random_ids(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        output = model(ids, labels=ids)
        optimizer.zero_grad()
        (output.loss + output.aux_loss).backward()
        optimizer.step()
    assert output.loss.item() < 0.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_of_either_width_and_any_layout(dtype):
    model, ids = tiny_model(), random_ids()
    wanted = model(ids, labels=ids)
    apart = ids.to(dtype).t().contiguous().t()
    assert not apart.is_contiguous()
    found = model(apart, labels=apart)
    assert torch.equal(found.logits, wanted.logits)
    assert found.loss.item() == wanted.loss.item()


def test_default_dtype_of_half_precision():
    try:
        torch.set_default_dtype(torch.bfloat16)
        model = MiniMindForCausalLM(tiny_config())
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.freqs_cos, tiny_model().model.freqs_cos)
    assert model(random_ids(), labels=random_ids()).loss.isfinite()


def test_training_mode_without_gradients():
    model, ids = tiny_model(use_moe=True).train(), random_ids()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model(ids, labels=ids).loss.grad_fn is None


@KINDS
def test_empty_batch(kind):
    assert tiny_model(**kind)(random_ids()[:0]).logits.shape == (0, 12, 97)


@pytest.mark.parametrize(
    ("ids", "numbers"),
    [
        (torch.tensor([[3, 97]]), "97 .*97 tokens"),
        (torch.tensor([[-1, 3]]), "-1 .*97 tokens"),
        (torch.tensor([3, 4]), r"\[2\]"),
        (torch.empty(2, 0, dtype=torch.long), r"\[2, 0\]"),
        (torch.ones(1, 2, 3, dtype=torch.long), r"\[1, 2, 3\]"),
    ],
)
def test_wrong_ids(ids, numbers):
    for call in (tiny_model(), tiny_model().generate):
        with pytest.raises(ValueError, match=numbers):
            call(ids)


def test_other_refusals():
    model, ids = tiny_model(), random_ids()
    with pytest.raises(ValueError, match="logits_to_keep at 0, not 2"):
        model(ids, labels=ids, logits_to_keep=2)
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, labels=ids, logits_to_keep=torch.tensor([0]))
    with pytest.raises(ValueError, match="-1"):
        model(ids, logits_to_keep=-1)
    with pytest.raises(ValueError, match=r"\[2, 12, 97\].*\[2, 11\]"):
        model(ids, labels=ids[:, 1:])
