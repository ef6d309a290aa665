"""What the explorer of tied embeddings says must be true: its gradients against autograd, its training, its picture."""

import numpy as np
import pytest
import torch

from minimind_core import MiniMindForCausalLM
from minimind_core.explorers import embeddings
from minimind_core.explorers.embeddings import EMBEDDING, HEAD, VOCAB

DEFAULTS = {key: control.default for key, control in embeddings.CONTROLS.items()}
SAT = "a cat sat on a mat."


def last(**changes):
    """The numbers of a state, trained as far as it says."""
    *_, (share, result) = embeddings.work(**(DEFAULTS | changes))
    assert share == 1
    return result.numbers


def rows_of(state: dict, chars: str) -> np.ndarray:
    rows = state[EMBEDDING][[VOCAB.index(char) for char in chars]].numpy()
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_the_story_lacks_four_letters():
    text = set(" ".join(embeddings.STORY.split()).lower())
    assert set(VOCAB) - text == set("jqxz?") and text <= set(VOCAB)


@pytest.mark.parametrize("slices", [0, 5])
@pytest.mark.parametrize("std", [0.02, 1.0])
@pytest.mark.parametrize("text", [SAT, "7 boats", "a", "é 漢 🙂"])
def test_the_two_gradients_add_up_to_that_of_one_parameter(text, std, slices):
    state = embeddings.training(True, std).state(slices)
    model = MiniMindForCausalLM(embeddings.CONFIG).double()
    model.load_state_dict(state)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = embeddings.to_ids(text)
    if ids.shape[1] < 2:
        ids = torch.cat([ids, ids], dim=1)
    loss = model(ids, labels=ids).loss
    loss.backward()
    ours, *ends = embeddings.gradients(state, ids)
    assert ours == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(ends[0] + ends[1], model.lm_head.weight.grad.numpy(), rtol=1e-9, atol=1e-12)
    read = np.unique(ids[0, :-1])
    assert np.array_equal(np.flatnonzero(np.linalg.norm(ends[0], axis=1)), read)  # the embedding end: tokens read
    assert np.linalg.norm(ends[1], axis=1).all()  # the head end: every token


def test_numbers_belong_to_the_token_and_its_text():
    n = last(token="t", text=SAT, steps=40)
    state, first = (embeddings.training(True, 0.02).state(slices) for slices in (5, 0))
    token, ids = VOCAB.index("t"), embeddings.to_ids(SAT + " ")
    _, *ends = embeddings.gradients(state, ids)
    for name, wanted in (("ends", ends), ("rows", (first[EMBEDDING], state[EMBEDDING]))):
        np.testing.assert_array_equal(n[name], [matrix[token] for matrix in wanted])
    np.testing.assert_allclose(n["sum"], ends[0][token] + ends[1][token])
    np.testing.assert_allclose(n["lengths"], [np.sqrt((end**2).sum(axis=1)) for end in ends])
    for rows, order, cosine in zip((first, state), n["near"], n["cosine"], strict=True):
        every = rows_of(rows, VOCAB) @ rows_of(rows, "t")[0]
        assert VOCAB.index("t") not in order
        np.testing.assert_allclose(cosine, np.sort(every)[::-1][1:6])
        np.testing.assert_allclose(every[order], cosine)


def test_tied_stays_one_matrix_and_untied_parts():
    for tied in (True, False):
        state = embeddings.training(tied, 0.02).state(2)
        assert torch.equal(state[EMBEDDING], state[HEAD]) == tied


def test_both_begin_with_the_same_numbers():
    tied, untied = (embeddings.untrained(flag, 0.02).state_dict() for flag in (True, False))
    assert all(torch.equal(tied[name], untied[name]) for name in tied)
    wide = embeddings.untrained(False, 1.0).state_dict()
    assert wide[EMBEDDING].std() == pytest.approx(1.0, abs=0.05) and wide[HEAD].std() == pytest.approx(0.02, abs=1e-3)
    one, other = (last(token="o", steps=0, tied=flag) for flag in (True, False))
    np.testing.assert_array_equal(one["ends"], other["ends"])


def test_a_row_that_is_never_read():
    """Untied: weight decay alone. Tied: all such rows go the same way."""
    run, slices = embeddings.training(False, 0.02), 15
    unread = [VOCAB.index(char) for char in "jqxz?"]
    left = (1 - embeddings.RATE * embeddings.DECAY) ** (slices * embeddings.SLICE)
    np.testing.assert_allclose(run.state(slices)[EMBEDDING][unread], left * run.state(0)[EMBEDDING][unread], rtol=1e-9)
    unit = rows_of(embeddings.training(True, 0.02).state(slices), "jqxz?")
    assert (unit @ unit.T).min() > 0.99
    assert set(last(token="q")["near"][1][:4]) == {VOCAB.index(char) for char in "jxz?"}


def test_neighbors_mean_something_after_training():
    state = embeddings.training(True, 0.02).state(15)
    for group, near, least in (("0123456789", 5, 45), ("aeiou", 4, 14)):
        members = [VOCAB.index(char) for char in group]
        found = [embeddings.nearest(state[EMBEDDING].numpy(), token)[0][:near] for token in members]
        assert np.isin(found, members).sum() >= least


def test_first_loss_by_std():
    uniform = np.log(len(VOCAB))
    for tied, std, low, high in ((True, 0.02, -0.2, 0.2), (False, 1.0, -0.2, 0.2), (True, 1.0, 20, 40)):
        first, now = last(steps=0, tied=tied, std=std)["loss"]
        assert first == now and low < first - uniform < high
        assert last(steps=120, tied=tied, std=std)["loss"][1] < first - 1


def test_training_is_adamw_on_the_core():
    """Two slices with a loop of its own."""
    model = embeddings.untrained(True, 0.2)
    decayed = {id(p) for name, p in model.named_parameters() if "norm" not in name}
    groups = [{"params": [p], "weight_decay": 0.1 * (id(p) in decayed)} for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    data, generator = embeddings.to_ids(" ".join(embeddings.STORY.split())), torch.Generator().manual_seed(0)
    for _ in range(16):
        starts = torch.randint(data.shape[1] - 32, (8, 1), generator=generator)
        ids = torch.stack([data[0, start : start + 32] for start in starts.flatten()])
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    kept = embeddings.training(True, 0.2).state(2)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(kept[name], value, rtol=1e-9, atol=1e-12)


def test_work_goes_on_where_it_stopped_and_keeps_what_it_has():
    embeddings.training.cache_clear()
    shares = [share for share, _ in embeddings.work(**(DEFAULTS | {"steps": 24}))]
    assert shares == pytest.approx([1 / 3, 2 / 3, 1])
    assert [share for share, _ in embeddings.work(**(DEFAULTS | {"steps": 40}))] == [0.5, 1.0]
    assert len(list(embeddings.work(**(DEFAULTS | {"steps": 16, "token": "q"})))) == 1
    late = last(steps=24)
    embeddings.training.cache_clear()
    np.testing.assert_array_equal(last(steps=24)["rows"], late["rows"])


def test_no_random_number_is_taken_from_the_reader():
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    embeddings.training.cache_clear()
    last(steps=8)
    assert torch.equal(torch.rand(3), wanted)


def test_the_picture_is_the_numbers():
    explorer = embeddings.explore(token="c", steps=40)
    scene, n = explorer.scene, explorer.result.numbers
    most = max(np.abs(n["ends"]).max(), np.abs(n["sum"]).max())
    for (_, sticks), values in zip(scene["sticks"], n["ends"], strict=True):
        np.testing.assert_allclose(sticks.get_ydata()[1::3] * most, values[: embeddings.SHOWN])
    np.testing.assert_allclose(scene["sum"][0].get_ydata() * most, n["sum"][: embeddings.SHOWN])
    for part, order in zip(scene["near"], n["near"], strict=True):
        assert [name.get_text() for name in part["names"]] == ["␣" if VOCAB[i] == " " else VOCAB[i] for i in order]
    counts = [len(table["dots"].get_xdata()) for table in scene["tables"]]
    assert counts == [len(set(SAT)), len(VOCAB)]
    explorer.set(tied=False)
    assert not any(artist.get_visible() for artist in scene["sum"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "'a' stands 5 times in the text. Its gradient"),
        ({"text": "cat"}, "'a' stands 1 time in the text"),
        ({"token": "q"}, "'q' is not in the text. Its gradient: 0 from the embedding end"),
        ({"token": "space", "text": "a b"}, "'space' stands 1 time in the text"),
        ({"text": "CATS"}, "Rows that get one: 4 of 40 from the embedding end, 40 from the head end"),
        ({"token": "?", "text": "x=y"}, "'?' stands 1 time in the text"),
        ({"tied": False}, "each stays with its own matrix"),
    ],
)
def test_sentence(changes, words):
    explorer = embeddings.explore(steps=0, **changes)
    assert words in explorer.sentence
    assert ("the sum" in explorer.sentence) == explorer.values["tied"]
