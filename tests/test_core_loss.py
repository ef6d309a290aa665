"""The shifted cross-entropy: exactly one shift, and nothing to predict is a zero that warns."""

import math

import pytest
import torch
import torch.nn.functional as F
from reference import gradients, random_ids, tiny_model

from minimind_core import shifted_cross_entropy

IDS = torch.tensor([[1, 2, 3, 4, 1, 2]])
COPIES_NEXT = torch.zeros(1, 6, 5)  # a model that knows the next token: logit 10 there
COPIES_NEXT[0, torch.arange(5), IDS[0, 1:]] = 10.0


def test_exactly_one_shift():
    assert shifted_cross_entropy(COPIES_NEXT, IDS).item() == pytest.approx(math.log(1 + 4 * math.exp(-10)), rel=1e-3)
    none = F.cross_entropy(COPIES_NEXT[0], IDS[0]).item()
    two = F.cross_entropy(COPIES_NEXT[0, :-2], IDS[0, 2:]).item()
    assert (none, two) == (pytest.approx(8.60, abs=0.01), pytest.approx(10.0, abs=0.01))


def test_the_model_shifts_once():
    model, ids = tiny_model(), random_ids()
    output = model(ids, labels=ids)
    wanted = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert output.loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_ignored_labels_do_not_count():
    logits = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    labels = IDS.repeat(2, 1)
    labels[0, 3:] = labels[1, :4] = -100
    rows, columns, targets = [0, 0, 1, 1], [0, 1, 3, 4], [2, 3, 1, 2]
    wanted = -logits.log_softmax(-1)[rows, columns, targets].mean()
    assert shifted_cross_entropy(logits, labels).item() == pytest.approx(wanted.item(), rel=1e-6)
    labels[labels == -100] = 0
    assert shifted_cross_entropy(logits, labels, ignore_index=0).item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("case", ["all ignored", "only the first labeled", "one token"])
def test_nothing_to_predict(case):
    model, ids = tiny_model(), random_ids(1, 6)
    labels = torch.full_like(ids, -100)
    if case == "only the first labeled":
        labels[0, 0] = 5  # nothing predicts the first token
    if case == "one token":
        ids, labels = ids[:, :1], ids[:, :1]
    with pytest.warns(UserWarning, match="no label to predict"):
        loss = model(ids, labels=labels).loss
    assert loss.item() == 0
    loss.backward()
    assert all((grad == 0).all() for grad in gradients(model).values())


def test_nothing_to_predict_stays_zero_beside_infinite_logits():
    logits = torch.full((1, 3, 5), math.inf, requires_grad=True)
    with pytest.warns(UserWarning):
        loss = shifted_cross_entropy(logits, torch.full((1, 3), -100))
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_arithmetic(dtype):
    logits = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    loss = shifted_cross_entropy(logits, IDS)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, shifted_cross_entropy(logits.float(), IDS))
    with pytest.warns(UserWarning):
        assert shifted_cross_entropy(logits, torch.full_like(IDS, -100)).dtype == torch.float32
    assert shifted_cross_entropy(logits.double(), IDS).dtype == torch.float64


@pytest.mark.parametrize("label", [5, 99, -1])
def test_labels_outside_the_vocabulary(label):
    labels = IDS.clone()
    labels[0, 2] = label
    with pytest.raises(ValueError, match=f"label {label} .*5 tokens"):
        shifted_cross_entropy(COPIES_NEXT, labels)


def test_a_label_at_the_first_place_is_never_looked_at():
    labels = IDS.clone()
    labels[0, 0] = -100
    assert torch.equal(shifted_cross_entropy(COPIES_NEXT, labels), shifted_cross_entropy(COPIES_NEXT, IDS))


def test_shapes_must_match():
    with pytest.raises(ValueError, match=r"\[1, 6, 5\].*\[1, 5\]"):
        shifted_cross_entropy(COPIES_NEXT, IDS[:, 1:])
