"""Mixture of experts: the router, the load-balancing loss, and the dispatch."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import gradients, largest_difference, perturb, random_ids, tiny_config, tiny_model

from minimind_core import FeedForward, MOEFeedForward, MoEGate, load_balancing_loss

X = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
TARGET = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))


def layer(**changes) -> MOEFeedForward:
    config = tiny_config(use_moe=True, moe_intermediate_size=48, **{"norm_topk_prob": False, **changes})
    return perturb(MOEFeedForward(config))


def run_all_then_pick(part: MOEFeedForward, x: torch.Tensor) -> torch.Tensor:
    """The slow reference: every expert on every token, then the k chosen ones."""
    weight, chosen = F.softmax(x @ part.gate.weight.T, dim=-1).topk(part.k, dim=-1)
    if part.gate.norm_topk_prob:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    every = torch.stack([expert(x) for expert in part.experts], dim=-2)
    picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, x.shape[-1]))
    return (picked * weight[..., None]).sum(dim=-2)


# ---------------------------------------------------------------- dispatch


@pytest.mark.parametrize("seq", [1, 16])
@pytest.mark.parametrize(("k", "norm"), [(1, False), (2, True), (2, False), (4, True)])
@pytest.mark.parametrize("training", [True, False])
def test_dispatch_equals_run_all_then_pick(k, norm, seq, training):
    part = layer(num_experts_per_tok=k, norm_topk_prob=norm).train(training)
    x, y = (X[:1, :seq].clone().requires_grad_() for _ in range(2))
    ours, wanted = part(x), run_all_then_pick(part, y)
    assert largest_difference(ours, wanted) < 1e-5
    with torch.no_grad():
        assert largest_difference(part(X[:1, :seq]), wanted) < 1e-5
    ours.square().mean().backward()
    found = {name: grad.clone() for name, grad in gradients(part).items()}
    part.zero_grad()
    wanted.square().mean().backward()
    assert largest_difference(x.grad, y.grad) < 1e-4
    for name, parameter in part.named_parameters():  # an expert not picked has a zero gradient in both
        assert (found[name] - parameter.grad).abs().max() <= 1e-4 * parameter.grad.abs().max(), name


def collapsed(expert: int, **changes) -> MOEFeedForward:
    """A layer whose router sends every token to one expert (the tokens' first feature must be positive)."""
    part = layer(**changes)
    with torch.no_grad():
        part.gate.weight.zero_()
        part.gate.weight[expert, 0] = 50.0
    return part


def test_all_tokens_to_one_expert():
    part, x = collapsed(2), X.clone()
    x[..., 0] = 3.0
    assert largest_difference(part(x), part.experts[2](x)) < 1e-5
    part(x).square().mean().backward()
    grads = gradients(part)  # zero for the idle ones, not missing
    assert all((grad == 0).all() == (".2." not in name) for name, grad in grads.items() if "experts" in name)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("grad", [True, False])
def test_a_broken_idle_expert_reaches_no_token(value, grad):
    part, x = collapsed(2), X.clone()
    x[..., 0] = 3.0
    with torch.no_grad():
        for parameter in part.experts[0].parameters():
            parameter.fill_(value)
    with torch.set_grad_enabled(grad):
        output = part(x)
    assert output.isfinite().all()
    if grad:
        output.square().mean().backward()
        assert all(parameter.grad.isfinite().all() for parameter in part.parameters())


def test_one_token_gives_every_parameter_a_gradient():
    part = layer()
    part(X[:1, :1]).sum().backward()
    gradients(part)


def test_without_gradients_only_the_chosen_experts_run():
    """So one token costs k experts, however many there are."""
    part, ran = layer(num_experts_per_tok=2, num_experts=16), []
    for i, expert in enumerate(part.experts):
        expert.register_forward_hook(lambda module, inputs, output, i=i: ran.append((i, len(output))))
    with torch.no_grad():
        chosen = part.gate(X[:1, :1])[0].flatten().tolist()
        part(X[:1, :1])
    assert sorted(ran) == sorted((i, 1) for i in chosen)


def test_shared_experts_serve_every_token():
    part = layer(n_shared_experts=2, num_experts_per_tok=2)
    assert "shared_experts.0.gate_proj.weight" in part.state_dict()
    wanted = run_all_then_pick(part, X) + part.shared_experts[0](X) + part.shared_experts[1](X)
    assert largest_difference(part(X), wanted) < 1e-5


@pytest.mark.parametrize("grad", [True, False])
def test_empty_batch(grad):
    with torch.set_grad_enabled(grad):
        model = tiny_model(use_moe=True, num_experts_per_tok=2)
        assert model(random_ids()[:0]).logits.shape == (0, 12, 97)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    part = layer(num_experts_per_tok=2, norm_topk_prob=True, n_shared_experts=1)
    wanted = part(X)
    found = part.to(dtype)(X.to(dtype))
    assert found.dtype == dtype
    rows = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert rows.median() < 0.02  # a token near a tie may visit another expert
    assert part.aux_loss.dtype == torch.float32


# ---------------------------------------------------------------- the router


def test_router():
    gate = MoEGate(tiny_config(use_moe=True, num_experts_per_tok=2))
    chosen, weight, probs = gate(X)
    assert chosen.shape == weight.shape == (2, 16, 2)
    assert torch.allclose(probs, F.softmax(X @ gate.weight.T, dim=-1))
    assert torch.equal(chosen, probs.topk(2).indices)
    assert torch.allclose(weight.sum(-1), torch.ones(2, 16))
    raw = MoEGate(tiny_config(use_moe=True, num_experts_per_tok=2, norm_topk_prob=False))
    raw.load_state_dict(gate.state_dict())
    assert torch.allclose(raw(X)[1], probs.topk(2).values)


def router_and_expert_gradient(**changes) -> tuple[float, float]:
    part = MOEFeedForward(tiny_config(use_moe=True, router_aux_loss_coef=0.0, **changes)).train()
    (part(X) - TARGET).square().mean().backward()
    return part.gate.weight.grad.norm().item(), part.experts[0].down_proj.weight.grad.norm().item()


def test_exact_gradient_of_p_over_p_is_nothing_and_it_warns():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="straight_through"):
        router, expert = router_and_expert_gradient(num_experts_per_tok=1, norm_topk_prob=True)
    assert router < 1e-6 * expert


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts_per_tok": 1, "norm_topk_prob": False},
        {"num_experts_per_tok": 2, "norm_topk_prob": True},
        {"num_experts_per_tok": 1, "router_gradient": "straight_through"},
        {"num_experts_per_tok": 2, "router_gradient": "straight_through"},
    ],
)
def test_the_router_learns(changes):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        router, expert = router_and_expert_gradient(**changes)
    assert router > 1e-2 * expert


@pytest.mark.parametrize("k", [1, 2])
def test_straight_through_has_the_same_outputs(k):
    exact, through = (
        layer(num_experts_per_tok=k, norm_topk_prob=True, router_gradient=kind).eval()
        for kind in ("exact", "straight_through")
    )
    assert torch.equal(exact(X), through(X))
    if k == 1:
        chosen = exact.gate(X)[0]
        assert largest_difference(through(X)[0, 0], through.experts[chosen[0, 0, 0]](X[0, 0])) < 1e-5  # weight 1


def test_straight_through_gradient_is_that_of_p_divided_by_its_value():
    part = layer(num_experts_per_tok=1, norm_topk_prob=True, router_gradient="straight_through")
    part(X).square().sum().backward()
    found = part.gate.weight.grad.clone()
    weight = part.gate.weight.detach().clone().requires_grad_()
    probs, chosen = F.softmax(X @ weight.T, -1).max(-1, keepdim=True)
    every = torch.stack([expert(X) for expert in part.experts], -2).detach()
    picked = every.gather(-2, chosen[..., None].expand(2, 16, 1, 64))[..., 0, :]
    (picked * (probs / probs.detach())).square().sum().backward()
    assert largest_difference(found, weight.grad) < 1e-4


def test_it_warns_once_and_only_where_the_router_is_trained():
    part = MOEFeedForward(tiny_config(use_moe=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part.eval()(X)
        with torch.no_grad():
            part.train()(X)
    with pytest.warns(UserWarning):
        part(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part(X)


# ---------------------------------------------------------------- the load-balancing loss

# two sequences of two tokens, two experts
PROBS = torch.tensor([[[0.9, 0.1], [0.8, 0.2]], [[0.4, 0.6], [0.7, 0.3]]])
TOP_1 = PROBS.topk(1).indices  # experts 0, 0 | 1, 0


def test_by_hand():
    # batch: f = (3/4, 1/4), P = (0.7, 0.3): 2 * (0.525 + 0.075) = 1.2
    assert load_balancing_loss(PROBS, TOP_1).item() == pytest.approx(1.2)
    # sequence: first f = (1, 0), P = (.85, .15): 1.7; second f = (1/2, 1/2), P = (.55, .45): 1. Mean 1.35
    assert load_balancing_loss(PROBS, TOP_1, level="sequence").item() == pytest.approx(1.35)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_does_not_count(dtype):
    mask = torch.tensor([[1, 1], [1, 0]]).to(dtype)
    # batch: f = (2/3, 1/3), P = (0.7, 0.3): 2 * (1.4 + 0.3) / 3
    assert load_balancing_loss(PROBS, TOP_1, mask).item() == pytest.approx(2 * 1.7 / 3)
    # sequence: 1.7 and, for the one token left, f = (0, 1), P = (.4, .6): 1.2
    assert load_balancing_loss(PROBS, TOP_1, mask, "sequence").item() == pytest.approx((1.7 + 1.2) / 2)
    # a sequence of padding alone is left out of the mean
    mask[1] = 0
    assert load_balancing_loss(PROBS, TOP_1, mask, "sequence").item() == pytest.approx(1.7)
    assert load_balancing_loss(PROBS, TOP_1, torch.zeros_like(mask)).item() == 0


@pytest.mark.parametrize("level", ["batch", "sequence"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_balance_is_1_for_every_k_and_collapse_is_e(k, level):
    even = torch.full((1, 8, 4), 0.25)
    chosen = torch.stack([(torch.arange(8) + i) % 4 for i in range(k)], -1)[None]
    assert load_balancing_loss(even, chosen, level=level).item() == pytest.approx(1.0)
    if k == 1:
        one_hot = F.one_hot(torch.zeros(1, 8, dtype=torch.long), 4).float()
        assert load_balancing_loss(one_hot, one_hot.topk(1).indices, level=level).item() == pytest.approx(4.0)


def test_at_most_e_over_k_when_each_token_visits_k():
    """k experts share the assignments, so f is at most 1/k: with k = E the loss is 1 whatever the router says."""
    probs = torch.tensor([[[0.97, 0.01, 0.01, 0.01]]]).expand(1, 8, 4)
    assert load_balancing_loss(probs, probs.topk(4).indices).item() == pytest.approx(1.0)
    assert load_balancing_loss(probs, probs.topk(2).indices).item() == pytest.approx(4 * 0.5 * 0.98)


def test_below_one_with_half_of_the_experts_idle():
    """f and P need not agree: two of four experts take all tokens, yet the loss is near 2/3."""
    tilt = 1e-4
    probs = torch.tensor([[[1 / 3 + tilt, 0, 1 / 3 - tilt, 1 / 3], [0, 1 / 3 + tilt, 1 / 3 - tilt, 1 / 3]]])
    loss = load_balancing_loss(probs, probs.topk(1).indices)
    assert loss.item() == pytest.approx(2 / 3, abs=1e-3)
    assert probs.topk(1).indices.unique().tolist() == [0, 1]


def test_f_has_no_gradient_and_p_has():
    logits = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    probs = logits.softmax(-1)
    load_balancing_loss(probs, probs.topk(2).indices).backward()
    f = F.one_hot(probs.topk(2).indices, 4).sum((0, 1, 2)) / 32
    other = logits.detach().clone().requires_grad_()
    (4 * f * other.softmax(-1).mean((0, 1))).sum().backward()
    assert largest_difference(logits.grad, other.grad) < 1e-5


def test_all_experts_chosen_leaves_the_router_alone():
    logits = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    probs = logits.softmax(-1)
    load_balancing_loss(probs, probs.topk(4).indices).backward()
    assert logits.grad.abs().max() < 1e-7


def test_of_the_model_it_is_summed_over_layers_with_its_coefficient_in_eval_too():
    model = tiny_model(use_moe=True, num_experts_per_tok=2, router_aux_loss_coef=0.3)
    output = model(random_ids())
    parts = [block.mlp.aux_loss for block in model.model.layers]
    assert output.aux_loss.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-6)
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight.zero_()  # even probabilities: 1 per layer
        assert model(random_ids()).aux_loss.item() == pytest.approx(2 * 1 * 0.3)
    assert tiny_model()(random_ids()).aux_loss.item() == 0


def test_of_the_layer_the_level_is_the_configs():
    batch, sequence = layer(router_aux_loss_coef=1.0), layer(router_aux_loss_coef=1.0, seq_aux=True)
    chosen, _, probs = batch.gate(X)
    for part, level in ((batch, "batch"), (sequence, "sequence")):
        part(X)
        assert part.aux_loss.item() == pytest.approx(load_balancing_loss(probs, chosen, level=level).item())
    assert batch.aux_loss.item() != pytest.approx(sequence.aux_loss.item())


def test_blocks_hand_the_padding_on():
    model = tiny_model(use_moe=True, num_experts_per_tok=2, router_aux_loss_coef=1.0)
    ids, mask = random_ids(2, 12), torch.ones(2, 12)
    mask[0, :5] = 0
    aux = model(ids, mask).aux_loss.item()
    other = ids.clone()
    other[0, :5] = 50  # what stands at padded places does not matter
    assert model(other, mask).aux_loss.item() == pytest.approx(aux, rel=1e-5)
    assert model(other).aux_loss.item() != pytest.approx(aux, rel=1e-3)
    past, seen = model(ids[:, :3], mask[:, :3], use_cache=True).past_key_values, []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda part, inputs: seen.append(inputs[1]))
    model(ids[:, 3:], mask, past)
    assert torch.equal(seen[0], mask[:, 3:].bool())  # of a mask that counts cached keys: the new tokens' part


def test_wrong_level_and_mask():
    with pytest.raises(ValueError, match="token"):
        load_balancing_loss(PROBS, TOP_1, level="token")
    with pytest.raises(ValueError, match=r"\[1, 2\].*\[2, 2\]"):
        load_balancing_loss(PROBS, TOP_1, torch.ones(1, 2))


def test_kaiming_gate_of_minimind_2():
    torch.manual_seed(0)
    model = tiny_model(use_moe=True, gate_init="kaiming_uniform", num_experts=16)
    model.init_weights()
    weight = model.model.layers[0].mlp.gate.weight
    bound = 1 / math.sqrt(64)  # sqrt(6 / ((1 + 5) * hidden))
    assert 0.9 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    normal = tiny_model(use_moe=True, num_experts=16)
    normal.init_weights()
    assert normal.model.layers[0].mlp.gate.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_experts_are_the_readers_own():
    class Mine(FeedForward):
        pass

    part = MOEFeedForward(tiny_config(use_moe=True, n_shared_experts=1, moe_intermediate_size=32), expert=Mine)
    assert all(isinstance(expert, Mine) for expert in [*part.experts, *part.shared_experts])
    assert part.experts[0].down_proj.weight.shape == (64, 32)
