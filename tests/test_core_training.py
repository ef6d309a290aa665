"""Training: the schedule, what an update is, and that a run which stops and goes on is the run that never stopped."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from reference import VOCAB, random_ids, tiny_config
from test_core_device import OneDevicePerOperation

from minimind_core import MiniMindForCausalLM, toy
from minimind_core.training import Trainer, TrainingSettings, batches, cosine_learning_rate, parameter_groups, processes
from minimind_core.training.interrupts import postponed_interrupt

CPU = torch.device(type="cpu")
LENGTH = 12
MOE = {"use_moe": True, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
DENSE = {}
KINDS = {"dense": DENSE, "moe": MOE}


def make_samples(number: int = 7, labeled: list[int] | None = None) -> list:
    """Samples whose labels end early, at other places: 2 to 10 labels are predicted, or as many as `labeled` says."""
    samples = []
    for i in range(number):
        ids = random_ids(1, LENGTH, seed=i)[0]
        labels = ids.clone()
        labels[1 + (2 + 5 * i % 9 if labeled is None else labeled[i]) :] = -100
        samples.append((ids, labels))
    return samples


SAMPLES = make_samples()
SETTINGS = {
    "batch_size": 2,
    "accumulation": 3,
    "epochs": 2,
    "learning_rate": 1e-2,
}  # updates of 3, 1, 3, 1 micro-batches
MICRO_STEPS = 8


def make_trainer(model: dict = DENSE, samples=None, held_out=None, **settings) -> Trainer:
    torch.manual_seed(0)
    language_model = MiniMindForCausalLM(tiny_config(**{"hidden_size": 32, "intermediate_size": 32, **model}))
    settings = TrainingSettings(**{**SETTINGS, **settings})
    return Trainer(language_model, SAMPLES if samples is None else samples, settings, held_out, CPU)


def gradient(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()]).clone()


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def timeless(records) -> list:
    return [record._replace(seconds=0) for record in records]


def same(trainer: Trainer, records: list, other: Trainer, other_records: list) -> bool:
    """Bit for bit: weights, both memories of the optimizer, the scaler, all that was recorded but the time."""
    state, other_state = (one.optimizer.state_dict()["state"] for one in (trainer, other))
    return (
        torch.equal(weights(trainer), weights(other))
        and all(torch.equal(state[i][name], other_state[i][name]) for i in state for name in state[i])
        and trainer.scaler.state_dict() == other.scaler.state_dict()
        and timeless(records) == timeless(other_records)
    )


def after_forward(trainer: Trainer, number: int, action) -> None:
    """Call action() once, in the forward pass of micro-batch `number`, counted from 1."""
    calls = []

    def hook(module, *_):
        calls.append(module.training)  # evaluation does not count
        if module.training and sum(calls) == number:
            action()

    trainer.model.register_forward_hook(hook)


# ---------------------------------------------------------------- the learning rate


def test_the_cosine_has_its_end_points_and_stays_low():
    rates = [cosine_learning_rate(step, 100, 1.0) for step in (0, 1, 25, 50, 75, 100, 150, 200)]
    assert rates == pytest.approx([1, 0.999778, 0.868198, 0.55, 0.231802, 0.1, 0.1, 0.1], abs=1e-6)


@pytest.mark.parametrize("warm_up", [0, 7])
def test_the_cosine_is_pytorchs(warm_up):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40 - warm_up, eta_min=0.03)
    for step in range(warm_up, 41):
        assert cosine_learning_rate(step, 40, 0.3, warm_up) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_the_warm_up_climbs_evenly_and_never_rests():
    rates = [cosine_learning_rate(step, 30, 5.0, 4) for step in range(60)]
    assert rates[:5] == pytest.approx([1, 2, 3, 4, 5])
    assert all(a >= b > 0 for a, b in pairwise(rates[4:]))
    for warm_up in (-1, 30, 31):
        with pytest.raises(ValueError, match=f"warm_up is {warm_up} of 30 steps"):
            cosine_learning_rate(0, 30, 1.0, warm_up)


def test_each_update_takes_the_rate_of_its_number():
    trainer = make_trainer(warm_up=1)
    seen = []
    trainer.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append([g["lr"] for g in optimizer.param_groups])
    )
    records = list(trainer.run(6))  # beyond the end of 4, where the rate stays
    expected = [cosine_learning_rate(step, 4, 1e-2, 1) for step in range(6)]
    assert [record.learning_rate for record in records] == expected and seen == [[rate] * 2 for rate in expected]
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert list(trainer.run()) == []


# ---------------------------------------------------------------- settings and groups


@pytest.mark.parametrize("tied", [True, False])
def test_each_parameter_is_in_one_group_and_norms_do_not_decay(tied):
    model = MiniMindForCausalLM(tiny_config(tie_word_embeddings=tied, **MOE))
    model.model.layers[0].mlp.gate.weight.requires_grad_(False)
    groups = parameter_groups(model, 0.3)
    found = [id(parameter) for group in groups for parameter in group["params"]]
    wanted = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(found) == sorted(set(found)) == sorted(wanted)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    norms = [id(parameter) for name, parameter in model.named_parameters() if "norm" in name]
    assert sorted(id(parameter) for parameter in groups[1]["params"]) == sorted(norms)
    assert len(parameter_groups(torch.nn.Linear(2, 2, bias=False), 0.1)) == 1


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number of at least 1"),
        ({"accumulation": 1.5}, "accumulation is 1.5"),
        ({"steps": 0}, "steps is 0"),
        ({"epochs": 0}, "epochs is 0; it must be above 0"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; it must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"dtype": "half"}, "dtype is 'half'; choose one of float32, bfloat16, float16"),
        ({"warm_up": 4}, "warm_up is 4 of 4 steps"),
    ],
)
def test_wrong_settings_name_the_number(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**wrong)


def test_wrong_models_and_samples_name_the_number():
    with pytest.raises(ValueError, match=r"no sample to train on"):
        make_trainer(samples=[])
    with pytest.raises(ValueError, match=r"weights are torch.bfloat16.*model.float\(\)"):
        Trainer(MiniMindForCausalLM(tiny_config()).bfloat16(), SAMPLES, device=CPU)
    short = [tuple(row[:5] for row in SAMPLES[0]), *SAMPLES[1:]]
    with pytest.raises(ValueError, match="5 to 12 tokens"):
        list(make_trainer(samples=short).run())


# ---------------------------------------------------------------- one update


def reference_gradient(trainer: Trainer, indices: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Of one update: the mean over all its labels, in one graph, from the logits; and the load-balancing loss, of the
    tokens up to each row's last label."""
    losses, aux, tokens = [], 0.0, [0] * len(indices)
    for j, micro_batch in enumerate(indices):
        ids, labels = (torch.stack([SAMPLES[i][k] for i in micro_batch]) for k in (0, 1))
        needed = torch.zeros_like(ids)
        for row, targets in zip(needed, labels.tolist(), strict=True):
            row[: max(i for i, target in enumerate(targets) if target != -100) + 1] = 1
        output = trainer.model(ids, attention_mask=needed)
        chosen = output.logits[:, :-1].log_softmax(-1)
        for row, targets in zip(chosen, labels[:, 1:], strict=True):
            for position, target in enumerate(targets.tolist()):
                if target != -100:
                    losses.append(-row[position, target])
                    tokens[j] += 1
        aux = aux + tokens[j] * output.aux_loss
    loss = torch.stack(losses).mean()
    trainer.model.zero_grad()
    (loss + aux / sum(tokens)).backward()
    return loss.item(), gradient(trainer)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_update_is_that_of_the_mean_over_its_labels(kind):
    """Labels spread unevenly, and the smaller update that is left over at the end of the epoch."""
    trainer = make_trainer(KINDS[kind], clip=None)
    for step, size in enumerate((3, 1, 3)):
        indices = trainer.batches.indices(step)
        assert len(indices) == size
        loss, expected = reference_gradient(trainer, indices)
        record = next(trainer.run(1))
        assert record.loss == pytest.approx(loss, rel=1e-6) and (record.aux_loss > 0) == (kind == "moe")
        assert (gradient(trainer) - expected).norm() < 1e-6 * expected.norm()
        assert record.gradient_norm == pytest.approx(expected.norm().item(), rel=1e-5)


def test_padding_changes_neither_loss_nor_load():
    """The same samples, with a row of other ids behind the last label: gradients are equal, the router's too."""

    def padded(pad: int, extra: int) -> list:
        return [
            (torch.cat([ids[:9], torch.full((extra,), pad)]), torch.cat([labels[:9], torch.full((extra,), -100)]))
            for ids, labels in make_samples(4, labeled=[3, 8, 5, 2])
        ]

    runs = []
    for pad, extra in ((1, 0), (2, 3), (3, 40)):
        trainer = make_trainer(MOE, samples=padded(pad, extra), clip=None, epochs=1)
        runs.append((next(trainer.run()), gradient(trainer)))
    for record, grad in runs[1:]:
        assert record.loss == pytest.approx(runs[0][0].loss, rel=1e-6)
        assert record.aux_loss == pytest.approx(runs[0][0].aux_loss, rel=1e-6) and record.aux_loss > 0
        assert (grad - runs[0][1]).norm() < 1e-5 * grad.norm()


def test_the_last_label_ends_what_counts():
    labels = torch.tensor([[-100, 5, -100, 6, -100], [-100, -100, -100, -100, -100], [1, 2, 3, 4, 5]])
    assert batches.before_last_label(labels).tolist() == [[True] * 4 + [False], [False] * 5, [True] * 5]


def test_labels_are_counted_after_the_shift():
    labels = torch.tensor([[5, 6, -100, 7], [5, -100, -100, -100], [-100, -100, -100, 9]])
    assert batches.predicted(labels) == 3  # 6, 7, 9: the first of a row is never predicted
    trainer = make_trainer(samples=make_samples(6, labeled=[3, 4, 0, 1, 2, 6]))
    assert [record.tokens for record in trainer.run()] == [16, 32]


def test_micro_batches_without_labels_weigh_nothing():
    """Zero labels, and labels where a mean over them would be 0 / 0."""
    with_labels = make_samples(2, labeled=[4, 7])
    ids = [ids for ids, _ in SAMPLES]
    samples = [*with_labels, *[(ids[i], torch.full_like(ids[i], -100)) for i in range(2, 6)]]
    settings = {"batch_size": 1, "epochs": 1, "clip": None}
    one, other = (
        make_trainer(samples=samples, accumulation=6, **settings),
        make_trainer(samples=with_labels, accumulation=2, **settings),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert next(one.run()).loss == pytest.approx(next(other.run()).loss)
    assert (gradient(one) - gradient(other)).norm() < 1e-6 * gradient(other).norm()


def test_an_update_without_any_label_is_left_out_and_counted():
    samples = make_samples(4, labeled=[0, 5, 0, 5])
    trainer = make_trainer(samples=samples, batch_size=1, accumulation=1, epochs=1)
    before, records, changed = weights(trainer).clone(), [], []
    with pytest.warns(UserWarning, match="update without any label to predict is left out") as caught:
        for record in trainer.run():
            records.append(record)
            changed.append(not torch.equal(before, weights(trainer)))
            before = weights(trainer).clone()
    assert len(records) == 2 and all(changed) and trainer.skipped == 2 and trainer.step == 4
    assert all(math.isfinite(record.loss) for record in records) and records[-1].tokens == 10
    assert weights(trainer).isfinite().all() and caught[0].filename == __file__


def test_clipping_shortens_long_gradients_only_and_reports_the_length_before():
    for clip, bound in ((0.05, True), (1e4, False), (None, False)):
        trainer = make_trainer(clip=clip)
        record = next(trainer.run())
        norm = gradient(trainer).norm().item()
        assert norm == pytest.approx(0.05 if bound else record.gradient_norm, rel=1e-3) and record.gradient_norm > 0.1


class NotingScaler:
    """Stands where the scaler stands and notes who calls, with the gradient's length at that time."""

    factor = 1024.0

    def __init__(self, trainer: Trainer):
        self.trainer, self.calls, self.norms = trainer, [], []

    def note(self, name: str) -> None:
        self.calls.append(name)
        self.norms.append(gradient(self.trainer).norm().item() if name != "scale" else None)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self.note("scale")
        return loss * self.factor

    def unscale_(self, optimizer) -> None:
        self.note("unscale_")
        for parameter in self.trainer.model.parameters():
            parameter.grad /= self.factor

    def step(self, optimizer) -> None:
        self.note("step")

    def update(self) -> None:
        self.calls.append("update")

    def get_scale(self) -> float:
        return self.factor


def test_gradients_are_unscaled_before_they_are_clipped():
    trainer = make_trainer(clip=0.5)
    trainer.scaler = scaler = NotingScaler(trainer)
    record = next(trainer.run())
    assert scaler.calls == ["scale", "scale", "scale", "unscale_", "step", "update"]
    *_, scaled, clipped = scaler.norms
    assert scaled == pytest.approx(1024 * record.gradient_norm, rel=1e-4)
    assert 0.99 * 0.5 <= clipped <= 0.5 * 1.001


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_matrix_products_take_the_dtype_and_only_float16_is_scaled(dtype):
    trainer = make_trainer(dtype=dtype)
    seen = set()
    projection = trainer.model.model.layers[0].mlp.up_proj
    projection.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    records = list(trainer.run())
    assert seen == {getattr(torch, dtype)} and trainer.scaler.is_enabled() == (dtype == "float16")
    assert records[0].loss == pytest.approx(math.log(VOCAB), rel=0.02) and records[-1].loss < records[0].loss
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    exact = next(make_trainer().run())
    assert records[0].gradient_norm == pytest.approx(exact.gradient_norm, rel=0.02)  # unscaled
    seen.clear()
    trainer.evaluate(SAMPLES)
    assert seen == {getattr(torch, dtype)}


def test_a_float16_overflow_costs_one_update_and_is_counted():
    trainer = make_trainer(dtype="float16", steps=3)
    trainer.scaler = torch.amp.GradScaler(CPU.type, init_scale=2.0**40)
    before = weights(trainer).clone()
    record = next(trainer.run())
    assert record.overflows == 1 and not math.isfinite(record.gradient_norm) and math.isfinite(record.loss)
    assert torch.equal(before, weights(trainer)) and trainer.scaler.get_scale() == 2.0**39
    trainer.scaler = torch.amp.GradScaler(CPU.type, init_scale=2.0**10)
    assert next(trainer.run()).overflows == 1 and not torch.equal(before, weights(trainer))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_before_it_spoils_the_weights(what):
    trainer = make_trainer(warm_up=1)
    next(trainer.run())
    before = weights(trainer).clone()
    if what == "loss":

        def spoil(module, inputs, output):
            output.loss = output.loss * math.inf

        trainer.model.register_forward_hook(spoil)
    else:
        trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    for _ in range(2):  # also when it is tried again
        message = (
            f"{what} of update 2 is (inf|nan) .*rate 0.01, warm_up 1, clip 1.0, dtype float32.*after update 1: try"
        )
        with pytest.raises(FloatingPointError, match=message):
            next(trainer.run())
    assert torch.equal(before, weights(trainer)) and (trainer.step, trainer.micro) == (1, 0)


def test_it_trains_the_toy_model_as_make_toy_model_does():
    data = torch.frombuffer(bytearray(toy.text()[:30000]), dtype=torch.uint8).long().unfold(0, 64, 64)
    samples = [(row, row) for row in data]
    torch.manual_seed(0)
    model = MiniMindForCausalLM(toy.CONFIG.replace(num_hidden_layers=2))
    settings = TrainingSettings(steps=24, batch_size=8, warm_up=4, learning_rate=3e-3, evaluate_every=10)
    records = list(Trainer(model, samples[:-20], settings, samples[-20:], CPU).run())
    seen = {record.step: record.held_out_loss for record in records if record.held_out_loss is not None}
    assert list(seen) == [10, 20, 24] and seen[24] < seen[10] < records[0].loss
    assert records[0].loss == pytest.approx(math.log(256), rel=0.03) and records[-1].loss < 4.0


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_weighs_tokens_and_restores_the_mode(training):
    trainer = make_trainer({**MOE, "dropout": 0.5})
    trainer.model.train(training)
    with torch.no_grad():
        ids, labels = batches.collate(SAMPLES, range(7))
        expected = trainer.model.eval()(ids, labels=labels).loss.item()  # the mean over all labels of one batch
    trainer.model.train(training)
    assert trainer.evaluate(SAMPLES) == pytest.approx(expected, rel=1e-6)  # in batches of 2, the last of 1
    assert trainer.model.training == training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    unlabeled = [(ids, torch.full_like(ids, -100)) for ids, _ in SAMPLES]
    assert trainer.evaluate([*SAMPLES, *unlabeled]) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="none of the 7 samples has a label"):
        trainer.evaluate(unlabeled)
    assert trainer.model.training == training


# ---------------------------------------------------------------- the order


def test_every_epoch_sees_each_sample_once_in_another_order():
    order = batches.Batches(SAMPLES, 2, 3, seed=0)
    epochs = [
        [i for step in (2 * epoch, 2 * epoch + 1) for part in order.indices(step) for i in part] for epoch in range(4)
    ]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [[len(part) for part in order.indices(step)] for step in range(2)] == [[2, 2, 2], [1]]
    torch.manual_seed(123)
    random.seed(5)
    assert [part for step in (4, 5) for part in order.indices(step)] == [
        part for step in (4, 5) for part in batches.Batches(SAMPLES, 2, 3, seed=0).indices(step)
    ]
    assert batches.Batches(SAMPLES, 2, 3, seed=1).order(0) != order.order(0)


def test_micro_batches_go_around_the_processes():
    order = batches.Batches(SAMPLES, 1, 5, seed=0)
    groups = [order.group(0, rank, 2) for rank in range(2)]
    ids = [[None if one is None else one[0][0] for one in group.batches] for group in groups]
    wanted = [SAMPLES[part[0]][0] for part in order.indices(0)]
    assert ids[1][2] is None and groups[1].tokens[2] == 0
    for j, row in enumerate(wanted):
        assert torch.equal(ids[j % 2][j // 2], row)


def test_the_callers_random_numbers_are_left_alone_and_do_not_matter():
    records = []
    for seed in (1, 2):
        trainer = make_trainer({"dropout": 0.3})
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        records.append(timeless(trainer.run()))
        assert torch.equal(before, torch.get_rng_state())
    assert records[0] == records[1]
    assert records[0] != timeless(make_trainer({"dropout": 0.3}, seed=1).run())
    assert records[0] != timeless(make_trainer().run())


def test_dropout_differs_between_micro_batches():
    trainer = make_trainer({"dropout": 0.5}, samples=[SAMPLES[0]] * 4, batch_size=1, accumulation=2)
    kept = []
    trainer.model.model.dropout.register_forward_hook(lambda module, inputs, output: kept.append(output != 0))
    list(trainer.run())
    assert len(kept) == 8 and all(not torch.equal(a, b) for i, a in enumerate(kept) for b in kept[:i])


# ---------------------------------------------------------------- stopping and going on


RUNS = [
    ({"dropout": 0.2}, "float32"),
    ({"dropout": 0.2}, "bfloat16"),
    ({"dropout": 0.2, **MOE}, "float32"),
    ({"dropout": 0.2, **MOE}, "bfloat16"),
    ({"dropout": 0.2}, "float16"),
]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{'moe' if 'use_moe' in run[0] else 'dense'}-{run[1]}")
def uninterrupted(request):
    """(how to make the trainer, the trainer after its whole run, its records)"""
    model, dtype = request.param

    def make() -> Trainer:
        trainer = make_trainer(model, held_out=SAMPLES[:3], dtype=dtype, warm_up=1, evaluate_every=2)
        if dtype == "float16":  # a scale that is not the first, and that grows in the third update
            trainer.scaler = torch.amp.GradScaler(CPU.type, init_scale=512.0, growth_interval=3)
        return trainer

    trainer = make()
    return make, trainer, list(trainer.run())


@pytest.mark.parametrize("number", range(MICRO_STEPS))
def test_resuming_is_bit_for_bit_wherever_it_stopped(uninterrupted, number, tmp_path):
    make, whole, whole_records = uninterrupted
    trainer, path = make(), tmp_path / "checkpoint.pt"
    if number:
        after_forward(trainer, number, lambda: setattr(trainer, "stop", 1))
    else:
        trainer.stop = 1
    records = list(trainer.run())
    assert (trainer.step, trainer.micro) == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0)][number]
    trainer.save(path)
    resumed = Trainer.resume(path, SAMPLES, SAMPLES[:3], CPU)
    assert resumed.seconds == trainer.seconds
    rest = list(resumed.run())
    assert same(resumed, records + rest, whole, whole_records)
    if number:  # the one that was stopped goes on too
        trainer.stop = 0
        assert same(trainer, records + list(trainer.run()), whole, whole_records)


@pytest.mark.parametrize("number", range(1, MICRO_STEPS + 1))
def test_an_interrupt_loses_nothing(uninterrupted, number):
    make, whole, whole_records = uninterrupted
    trainer, records, interrupts = make(), [], 0
    after_forward(trainer, number, lambda: os.kill(os.getpid(), signal.SIGINT))
    while len(records) < 4 and interrupts < 3:
        try:
            for record in trainer.run():
                records.append(record)
        except KeyboardInterrupt:
            interrupts += 1
            trainer.model.eval()  # a look at the model
            torch.rand(3)
    assert interrupts == 1 and same(trainer, records, whole, whole_records)


def test_an_interrupt_right_after_the_weights_changed_does_not_change_them_twice(uninterrupted):
    make, whole, whole_records = uninterrupted
    trainer, records, places = make(), [], []

    def interrupt(*_):
        places.append(trainer.step)
        if len(places) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    trainer.optimizer.register_step_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        for record in trainer.run():
            records.append(record)
    assert (len(records), trainer.step) == (1, 2)  # the second record is kept for the next run
    records += trainer.run()
    assert same(trainer, records, whole, whole_records) and places == [0, 1, 2, 3]


def test_a_break_loses_nothing(uninterrupted):
    make, whole, whole_records = uninterrupted
    trainer, records = make(), []
    while len(records) < 4:
        for record in trainer.run():
            records.append(record)
            break
        trainer.model.eval()(SAMPLES[0][0][None], labels=SAMPLES[0][0][None]).loss.backward()  # somebody else's
    assert same(trainer, records, whole, whole_records)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_after_an_error_the_update_is_done_anew(uninterrupted, number):
    make, whole, whole_records = uninterrupted
    trainer = make()

    def fail():
        raise MemoryError("full")

    after_forward(trainer, number, fail)
    with pytest.raises(MemoryError):
        next(trainer.run())
    assert same(trainer, list(trainer.run()), whole, whole_records)


def test_run_takes_a_number_of_updates():
    trainer = make_trainer()
    assert [[record.step for record in trainer.run(n)] for n in (1, 0, 2, 3)] == [[1], [], [2, 3], [4, 5, 6]]


def test_an_interrupt_waits_for_the_end_and_the_handler_comes_back():
    before, done = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt):
        with postponed_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("all")
    assert done == ["all"] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(MemoryError), postponed_interrupt():
        raise MemoryError
    assert signal.getsignal(signal.SIGINT) is before
    records = []
    thread = threading.Thread(target=lambda: records.extend(make_trainer().run()))  # where no handler can be set
    thread.start()
    thread.join()
    assert len(records) == 4


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def saved(tmp_path):
    trainer = make_trainer(held_out=SAMPLES[:2])
    next(trainer.run())
    trainer.save(tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def test_a_checkpoint_of_another_run_says_what_differs(saved):
    def resume(samples=SAMPLES, model=None, **changes):
        settings = TrainingSettings(**{**SETTINGS, **changes})
        return Trainer.resume(saved, samples, None, CPU, model, settings)

    assert resume(evaluate_every=3, epochs=1.9).step == 1  # as many updates, and looking changes nothing
    with pytest.raises(ValueError) as error:
        resume(learning_rate=0.5, clip=None, accumulation=4)
    assert all(
        line in str(error.value)
        for line in (
            "another run",
            "settings: learning_rate is 0.01 there, 0.5 here",
            "settings: clip is 1.0 there, None here",
            "settings: accumulation times processes is 3 there, 4 here",
        )
    )
    assert "batch_size" not in str(error.value)
    with pytest.raises(ValueError, match="steps is 4 there, 9 here"):
        resume(steps=9)
    config = tiny_config(hidden_size=64, intermediate_size=32)
    with pytest.raises(ValueError, match="model: hidden_size is 32 there, 64 here"):
        resume(model=MiniMindForCausalLM(config))
    with pytest.raises(ValueError, match="data: samples is 7 there, 6 here"):
        resume(SAMPLES[:6], steps=4)
    changed = [(ids.roll(int(i == 6)), labels) for i, (ids, labels) in enumerate(SAMPLES)]
    with pytest.raises(ValueError, match="data: check sum is "):
        resume(changed)


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("trapped",))


def test_what_is_no_checkpoint_is_refused(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none.pt is no file"):
        Trainer.resume("none.pt", SAMPLES)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(saved.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut.pt \(5000 bytes\) cannot be read"):
        Trainer.resume(cut, SAMPLES)
    torch.save({"format": 1, "trap": Trap()}, tmp_path / "trap.pt")
    flipped = bytearray(saved.read_bytes())
    place = flipped.index(torch.load(saved, weights_only=True)["weights"]["lm_head.weight"].numpy().tobytes())
    flipped[place + 41] ^= 16
    (tmp_path / "flipped.pt").write_bytes(flipped)
    with pytest.raises(ValueError, match=r"flipped.pt .*cannot be read.*check sum"):
        Trainer.resume(tmp_path / "flipped.pt", SAMPLES)
    with pytest.raises(ValueError, match=r"trap.pt .*cannot be read"):
        Trainer.resume(tmp_path / "trap.pt", SAMPLES)
    assert not (tmp_path / "trapped").exists()
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt is no checkpoint of format 1 \(found: None\)"):
        Trainer.resume(tmp_path / "other.pt", SAMPLES)


def test_an_error_while_writing_leaves_the_old_checkpoint(saved, monkeypatch):
    old, trainer = saved.read_bytes(), make_trainer()
    list(trainer.run())
    write = torch.save

    def fail(state, file):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        trainer.save(saved)
    monkeypatch.setattr(torch, "save", write)
    assert saved.read_bytes() == old and os.listdir(saved.parent) == [saved.name]
    trainer.save(saved)
    assert Trainer.resume(saved, SAMPLES, device=CPU).step == 4 and os.listdir(saved.parent) == [saved.name]


def test_a_kill_while_writing_leaves_the_old_checkpoint(saved):
    old, paths = saved.read_bytes(), [Path(__file__).parent, Path(__file__).parents[1]]
    code = (
        f"import os, signal, sys, torch; sys.path[:0] = {list(map(str, paths))}\n"
        "import test_core_training as t; trainer = t.make_trainer()\n"
        "def die(state, file): file.write(b'half'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "torch.save = die; trainer.save(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(saved)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert saved.read_bytes() == old and len(os.listdir(saved.parent)) == 2  # the half beside it, which is not read
    trainer = Trainer.resume(saved, SAMPLES, device=CPU)
    trainer.save(saved)
    assert os.listdir(saved.parent) == [saved.name]


def test_the_tied_matrix_is_written_once_and_tied_again(saved):
    model = Trainer.resume(saved, SAMPLES, device=CPU).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored = torch.load(saved, weights_only=True)["weights"]
    assert stored["lm_head.weight"].data_ptr() == stored["model.embed_tokens.weight"].data_ptr()


# ---------------------------------------------------------------- where things are


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_made_on_the_trainers_device(kind, tmp_path):
    trainer = make_trainer({**KINDS[kind], "dropout": 0.1}, held_out=SAMPLES[:3])
    after_forward(trainer, 2, lambda: setattr(trainer, "stop", 1))
    expected = list(make_trainer({**KINDS[kind], "dropout": 0.1}, held_out=SAMPLES[:3]).run())
    with torch.device("meta"), OneDevicePerOperation():
        list(trainer.run())
        trainer.save(tmp_path / "checkpoint.pt")
        resumed = Trainer.resume(tmp_path / "checkpoint.pt", SAMPLES, SAMPLES[:3], CPU, trainer.model)
        records = list(resumed.run())
    assert timeless(records) == timeless(expected)


def test_one_process_needs_no_others():
    assert (processes.count(), processes.rank(), processes.add(1.5, 2), processes.largest(3)) == (1, 0, [1.5, 2], 3)
    assert processes.gather("a") == ["a"]
