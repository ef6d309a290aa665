"""What the explorers of the MoE gate draw: the router against plain loops, the training against the core's own parts
and autograd; and the notebook's copy of Hugging Face's formula against the library."""

import json
import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import minimind_core as core
from minimind_core.explorers import balance, router

# ---------------------------------------------------------------- the router


def softmax(logits: list[float]) -> list[float]:
    grown = [math.exp(z - max(logits)) for z in logits]
    return [value / sum(grown) for value in grown]


def logits_of(preference: str, skew: float, temperature: float, experts: int, k: int, tokens: int) -> list:
    """[sequence][token][expert], from the description of the three preferences alone."""
    result, half = [], experts // 2
    for s in range(4):
        rows = []
        for t in range(tokens):
            row = [router.NOISE[s, t, e].item() for e in range(experts)]
            if preference == "one favorite":
                row[0] += skew
            elif preference == "by topic":
                row = [z + skew * (e % min(experts, 4) == s % min(experts, 4)) for e, z in enumerate(row)]
            else:
                own = {(k * (s * tokens + t) + i) % half for i in range(min(k, half))}
                row = [0.001 if e in own else -skew if e < half else 0.0 for e in range(experts)]
                row = [z - 1e-6 * e for e, z in enumerate(row)]
            rows.append([z / temperature for z in row])
        result.append(rows)
    return result


def losses_of(logits: list, k: int, chosen: list | None = None) -> tuple[float, float, list]:
    """(batch, sequence, chosen): both losses by counting; `chosen` as given, where a nudge must not change it."""
    experts = len(logits[0][0])
    probs = [[softmax(row) for row in rows] for rows in logits]
    chosen = chosen or [[sorted(range(experts), key=lambda e, r=row: -r[e])[:k] for row in rows] for rows in logits]

    def loss(sequences) -> float:
        rows = [row for s in sequences for row in probs[s]]
        picks = [pick for s in sequences for pick in chosen[s]]
        total = 0.0
        for e in range(experts):
            f = sum(e in pick for pick in picks) / (k * len(picks))
            total += f * sum(row[e] for row in rows) / len(rows)
        return experts * total

    return loss(range(4)), sum(loss([s]) for s in range(4)) / 4, chosen


STATES = [
    ("one favorite", 0.0, 1.0, 4, 1, 8),
    ("one favorite", 3.0, 2.0, 8, 3, 5),
    ("one favorite", 10.0, 1.0, 2, 2, 3),
    ("by topic", 5.0, 1.0, 4, 1, 6),
    ("by topic", 2.0, 0.5, 7, 2, 4),
    ("by topic", 4.0, 1.0, 2, 1, 1),
    ("runners-up", 8.0, 1.0, 4, 1, 4),
    ("runners-up", 3.0, 2.0, 8, 2, 6),
    ("runners-up", 6.0, 1.0, 5, 3, 4),
]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_router_counts_by_hand(state):
    *where, experts, k, tokens = state
    result = router.compute(*state, 0.03)
    logits = logits_of(*where, experts, k, tokens)
    batch, sequence, chosen = losses_of(logits, k)
    np.testing.assert_allclose(result.numbers["aux"], [batch, sequence], rtol=1e-9)
    picks = [pick for rows in chosen for pick in rows]
    load = [sum(e in pick for pick in picks) / (k * len(picks)) for e in range(experts)]
    np.testing.assert_allclose(result.numbers["load"], load)
    by_sequence = [[sum(e in pick for pick in rows) / (k * tokens) for e in range(experts)] for rows in chosen]
    np.testing.assert_allclose(result.numbers["by_sequence"], by_sequence)
    rows = [softmax(row) for sequence_rows in logits for row in sequence_rows]
    np.testing.assert_allclose(result.numbers["probability"], np.mean(rows, axis=0))
    assert f"Auxiliary loss {batch:.2f} over the batch, {sequence:.2f} by sequence" in result.sentence
    assert f"{sum(value == 0 for value in load) or 'none'} " in result.sentence


@pytest.mark.parametrize("state", STATES, ids=str)
def test_arrows_are_the_slope_downwards(state):
    """Nudge one expert's logit in the whole first sequence, keep the choices, and see how the losses move."""
    *where, experts, k, tokens = state
    push = router.compute(*state, 0.03).numbers["push"]
    logits, nudge = logits_of(*where, experts, k, tokens), 1e-5
    chosen = losses_of(logits, k)[2]
    for e in range(experts):
        moved = []
        for side in (nudge, -nudge):
            first = [[z + side * (i == e) for i, z in enumerate(row)] for row in logits[0]]
            moved.append(losses_of([first, *logits[1:]], k, chosen)[:2])
        slope = (np.array(moved[0]) - np.array(moved[1])) / (2 * nudge)
        np.testing.assert_allclose(push[:, e], -0.03 * slope, atol=1e-8)


def test_presets_show_what_they_are_called():
    explorer = router.explore()
    found = {}
    for preset in explorer.presets:
        explorer.reset()
        explorer.choose(preset)
        found[preset] = explorer.result.numbers
    assert found["balanced"]["load"] == pytest.approx([0.25] * 4, abs=0.03)
    assert found["balanced"]["aux"] == pytest.approx([1, 1], abs=0.02)
    assert found["collapsed"]["load"].tolist() == [1] + [0] * 7
    assert found["collapsed"]["aux"][0] == pytest.approx(8 * found["collapsed"]["probability"][0])
    assert found["collapsed"]["probability"][0] == pytest.approx(0.9, abs=0.005)
    assert found["below one"]["load"].tolist() == [0.5, 0.5, 0, 0]
    assert found["below one"]["aux"] == pytest.approx([2 / 3, 2 / 3], abs=2e-3)
    assert (found["below one"]["push"][:, 2:] > 0).all() and (found["below one"]["push"][:, :2] < 0).all()
    assert found["by topic"]["aux"][0] == pytest.approx(1, abs=0.01) and found["by topic"]["aux"][1] > 3.9


def test_all_experts_for_every_token_leave_no_push():
    numbers = router.compute("one favorite", 2.0, 1.0, 4, 8, 16, 1.0).numbers  # k above experts: all are chosen
    assert numbers["aux"] == pytest.approx([1, 1]) and abs(numbers["push"]).max() < 1e-12
    np.testing.assert_allclose(numbers["load"], 0.25)


def test_router_picture_is_the_numbers():
    explorer = router.explore(experts=5, preference="by topic", skew=4.0)
    scene, numbers = explorer.scene, explorer.result.numbers
    for name in ("load", "probability"):
        np.testing.assert_allclose([bar[0].get_height() for bar in scene[name][:5]], numbers[name])
        assert [bar[0].get_visible() for bar in scene[name]] == [True] * 5 + [False] * 3
    assert [bar[0].get_width() for bar in scene["aux"]] == numbers["aux"]
    np.testing.assert_allclose(scene["dots"].get_ydata(), numbers["by_sequence"].ravel())
    assert scene["even"].get_ydata() == [0.2, 0.2]
    for (shaft, up, down), push in zip(scene["arrows"], numbers["push"], strict=True):
        np.testing.assert_allclose(shaft.get_ydata()[1::3], push)
        assert set(up.get_ydata()) == {v for v in push if v > 1e-5}
        assert set(down.get_ydata()) == {v for v in push if v < -1e-5}


# ---------------------------------------------------------------- training


def by_the_core(router_weight, experts, x, y, k, weight, coefficient, level):
    """One step's losses and gradients: core.MoEGate, core.load_balancing_loss, autograd."""
    count = len(router_weight)
    config = core.MiniMindConfig(
        hidden_size=balance.HIDDEN,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_moe=True,
        num_experts=count,
        num_experts_per_tok=k,
        norm_topk_prob=weight != balance.RAW,
        router_gradient="straight_through" if weight == balance.THROUGH else "exact",
    )
    gate = core.MoEGate(config).double().eval()
    gate.weight.data = torch.tensor(router_weight)
    maps = torch.tensor(experts, requires_grad=True)
    x, y = (torch.tensor(part).view(balance.SEQUENCES, balance.SEQ, balance.HIDDEN) for part in (x, y))
    chosen, weights, probs = gate(x)
    every = torch.stack([x @ one.T for one in maps], dim=-2)
    picked = every.gather(-2, chosen[..., None].expand(*chosen.shape, balance.HIDDEN))
    task = ((picked * weights[..., None]).sum(dim=-2) - y).square().sum(dim=-1).mean()
    aux = {name: core.load_balancing_loss(probs, chosen, level=name) for name in ("batch", "sequence")}
    grads = torch.autograd.grad(task + coefficient * aux[level], (gate.weight, maps))
    load = chosen.flatten().bincount(minlength=count) / chosen.numel()
    return grads, load, (task, aux["batch"], aux["sequence"])


@pytest.mark.parametrize("weight", balance.WEIGHTS)
@pytest.mark.parametrize(("experts", "k"), [(2, 1), (4, 2), (8, 1), (8, 3), (3, 3)])
@pytest.mark.parametrize("level", ["batch", "sequence"])
def test_one_step_is_that_of_the_core(weight, experts, k, level):
    x, y, first, maps = balance.task(3)
    state = 20 * first[:experts], maps[:experts]  # a router with an opinion
    grads, load, losses = balance.step(*state, x[5], y[5], k, weight, 0.7, level)
    wanted, wanted_load, wanted_losses = by_the_core(*state, x[5], y[5], k, weight, 0.7, level)
    np.testing.assert_allclose(load, wanted_load, atol=1e-7)
    np.testing.assert_allclose(losses, [loss.item() for loss in wanted_losses], rtol=1e-9)
    for grad, other in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(grad, other.numpy(), rtol=1e-7, atol=1e-10)


def test_training_is_adam():
    """Thirty steps with torch's own optimizer and autograd."""
    x, y, first, maps = balance.task(0)
    values = [torch.tensor(first[:4]), torch.tensor(maps[:4])]
    optimizer = torch.optim.Adam(values, lr=balance.RATE, betas=(0.9, 0.99))
    losses = []
    for now in range(30):
        grads, _, (task, *_) = by_the_core(*(v.numpy() for v in values), x[now], y[now], 2, balance.EXACT, 0.1, "batch")
        losses.append(task.item())
        for value, grad in zip(values, grads, strict=True):
            value.grad = grad
        optimizer.step()
    ours = [loss for _, (loss, *_) in islice(balance.train(4, 2, balance.EXACT, 0.1, "batch", 0), 30)]
    np.testing.assert_allclose(ours, losses, rtol=1e-6)


def test_the_exact_router_gets_nothing_from_the_task():
    x, y, first, maps = balance.task(1)
    grads, _, _ = balance.step(first, maps, x[0], y[0], 1, balance.EXACT, 0.0, "batch")
    assert abs(grads[0]).max() < 1e-15 < abs(grads[1]).max()


def state(**changes) -> dict:
    return {name: control.default for name, control in balance.CONTROLS.items()} | changes


def test_work_goes_forward_in_slices_and_shows_only_what_was_done():
    seen = list(balance.work(**state(aux=True)))
    shares = [share for share, _ in seen]
    assert shares == sorted(set(shares)) and shares[-1] == 1.0 and len(seen) == balance.STEPS // balance.SLICE
    last = seen[-1][1].numbers
    for i, (_, result) in enumerate(seen, start=1):
        assert len(result.numbers["task"]) == i
        np.testing.assert_array_equal(result.numbers["load"], last["load"][:i])
        np.testing.assert_allclose(result.numbers["load"].sum(axis=1), 1)
        assert f"After {i * balance.SLICE} steps" in result.sentence
    assert f"Task loss {last['task'][-5:].mean():.2f} ({last['baseline'][-5:].mean():.2f} without" in result.sentence


def test_without_auxiliary_loss_it_is_its_own_baseline():
    *_, (_, off) = balance.work(**state(aux=False, coefficient=10.0, start=2))
    np.testing.assert_array_equal(off.numbers["task"], off.numbers["baseline"])
    assert "without auxiliary loss" not in off.sentence


def outcome(preset: str, start: int) -> tuple[int, float]:
    """(idle experts, task loss) of the last 40 steps."""
    *_, (_, result) = balance.work(**state(**balance.PRESETS[preset], start=start))
    return int((result.numbers["load"][-5:].mean(axis=0) < balance.IDLE).sum()), result.numbers["task"][-5:].mean()


def test_what_the_presets_promise_holds_over_random_starts():
    runs = {preset: [outcome(preset, start) for start in range(10)] for preset in balance.PRESETS}
    idle = {preset: sum(some for some, _ in run) for preset, run in runs.items()}
    loss = {preset: np.mean([value for _, value in run]) for preset, run in runs.items()}
    assert idle["aux off"] >= 10 and not any(idle[preset] for preset in runs if preset != "aux off")
    assert loss["aux on"] < 0.9 * loss["aux off"] < loss["too large"] < loss["cannot learn"]
    for preset in ("too large", "by sequence", "cannot learn"):  # worse than "aux on" in every single run
        assert all(one > other for (_, one), (_, other) in zip(runs[preset], runs["aux on"], strict=True))


def test_balance_picture_is_the_numbers():
    explorer = balance.explore(aux=True, experts=3)
    scene, numbers = explorer.scene, explorer.result.numbers
    assert [band.get_visible() for band in scene["bands"]] == [True] * 3 + [False] * 5
    edges = np.cumsum(numbers["load"][-1])
    for band, top in zip(scene["bands"], edges, strict=False):
        at_the_end = [y for x, y in band.get_paths()[0].vertices if x == balance.STEPS]
        assert max(at_the_end) == pytest.approx(top) and min(at_the_end) == pytest.approx(
            max(at_the_end) - (numbers["load"][-1][edges.tolist().index(top)])
        )
    for name in ("task", "batch", "sequence"):
        np.testing.assert_array_equal(scene[name].get_ydata(), numbers[name])
        assert scene[name].get_xdata()[0] == (balance.SLICE) / 2
    np.testing.assert_array_equal(scene["baseline"][0].get_ydata(), numbers["baseline"])
    assert scene["baseline"][0].get_visible()
    explorer.set(aux=False)
    assert not any(artist.get_visible() for artist in scene["baseline"])


# ---------------------------------------------------------------- the notebook's formula


def test_hugging_face_formula_of_the_notebook_is_the_librarys():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func as qwen

    path = Path(__file__).parents[1] / "notebooks" / "08_moe_gate.ipynb"
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    (source,) = [text for text in sources if "def hugging_face_aux(" in text]
    names = {"torch": torch}
    exec(source[source.index("def hugging_face_aux(") :].split("\n\n\n")[0], names)
    generator = torch.Generator().manual_seed(0)
    for layers, experts, k in ((1, 4, 1), (2, 4, 2), (3, 8, 3)):
        logits = tuple(torch.randn(20, experts, generator=generator) for _ in range(layers))
        ours = names["hugging_face_aux"](logits, experts, k)
        for theirs in (mixtral, qwen):
            torch.testing.assert_close(ours, theirs(logits, experts, k))
        if layers == 1:
            probs = logits[0].softmax(-1)[None]
            here = core.load_balancing_loss(probs, probs.topk(k).indices)
            torch.testing.assert_close(ours, k * here)
