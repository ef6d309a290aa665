"""What the tokenizer's explorer shows must be what the core does: its merges, tokens, curve and marks."""

import random
from itertools import pairwise

import numpy as np
import pytest

from minimind_core import bpe as core
from minimind_core.explorers import tokenizer

TEXTS = ["tokens of 你好 and 😀", "it is often in the text", "a", "\t\x00é 犇 🙂", "aaaaaaa", "1000, 2024"]


def test_the_merges_are_the_cores():
    assert tokenizer.learned(True) == core.train_merges(tokenizer.TEXT.splitlines(), tokenizer.MOST)
    assert len(tokenizer.learned(True)) == len(tokenizer.learned(False)) == tokenizer.MOST
    crossing = [token for token in tokenizer.tokens(False) if b" " in token[1:]]
    assert crossing and not [token for token in tokenizer.tokens(True) if b" " in token[1:]]


def test_without_cuts_the_merges_are_those_of_whole_lines():
    lines = [list(line.encode()) for line in tokenizer.TEXT.splitlines()]
    for rank, pair in enumerate(tokenizer.learned(False)[:40]):
        counts = {}
        for line in lines:
            for one in pairwise(line):
                counts[one] = counts.get(one, 0) + 1
        assert counts[pair] == max(counts.values()), rank
        lines = [core.merge(line, pair, 256 + rank) for line in lines]


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokens_are_the_cores(text):
    merges = tokenizer.learned(True)
    lengths = [len(core.encode(text, merges[:n])) for n in range(tokenizer.MOST + 1)]
    for n in (0, 1, 60, 110, 111, tokenizer.MOST):
        numbers = tokenizer.compute(text, n, True).numbers
        assert numbers["ids"] == core.encode(text, merges[:n])
        assert numbers["last"] == core.encode(text, merges)
        assert numbers["curve"].tolist() == lengths


@pytest.mark.parametrize("text", TEXTS)
def test_without_cuts_the_text_is_one_piece(text):
    merges = tokenizer.learned(False)
    for n in (0, 60, tokenizer.MOST):
        ranks = {pair: rank for rank, pair in enumerate(merges[:n])}
        assert tokenizer.compute(text, n, False).numbers["ids"] == core.merge_by_rank(list(text.encode()), ranks)


@pytest.mark.parametrize("cut", [True, False])
def test_the_next_merge_comes_next(cut):
    """At its rank nothing has changed yet; one merge later the marked pairs, and only they, are joined."""
    rng = random.Random(0)
    for text in TEXTS:
        for n in rng.sample(range(tokenizer.MOST), 20):
            now = tokenizer.compute(text, n, cut).numbers
            if not now["to_come"]:
                assert now["ids"] == now["last"] and now["places"] == []
                continue
            rank, left, right = now["to_come"][0]
            assert rank >= n and tokenizer.learned(cut)[rank] == (left, right)
            assert tokenizer.compute(text, rank, cut).numbers["ids"] == now["ids"]
            wanted = list(now["ids"])
            for place in reversed(now["places"]):
                assert wanted[place : place + 2] == [left, right]
                wanted[place : place + 2] = [256 + rank]
            assert tokenizer.compute(text, rank + 1, cut).numbers["ids"] == wanted


def test_places_of_a_pair():
    assert tokenizer.found([[1, 1, 1], [1, 1]], (1, 1)) == [0, 3], "no overlap, none across a cut"
    assert tokenizer.found([[2, 1], [2]], (1, 2)) == []


def test_kinds_and_spelling():
    assert [tokenizer.kind(token) for token in (b"a", b" a", "é".encode(), b"\xe4", b"a\xe4")] == [
        "byte",
        "merged",
        "merged",
        "half",
        "half",
    ]
    shown = {b"a": "a", b" the": "␣the", b"\n": "0A", b"\xe4\xbd": "E4 BD", "你".encode(): "U+4F60"}
    assert {token: tokenizer.written(token) for token in shown} == shown
    assert tokenizer.named(b" t") == "' t'" and tokenizer.named(b"\xe4\xbd") == "<E4 BD>"


def test_the_picture_is_the_result():
    explorer = tokenizer.explore(text="on 你", merges=108)
    scene, n = explorer.scene, explorer.result.numbers
    known = tokenizer.tokens(True)
    assert [label.get_text() for label in scene["bytes"] if label.get_visible()] == ["6F", "6E", "20", "E4  BD  A0"]
    assert [label.get_text() for label in scene["chars"] if label.get_visible()] == ["o", "n", "␣", "U+4F60"]
    for lane, ids in enumerate((n["ids"], n["last"])):
        assert [label.get_text() for label in scene["ids"][lane] if label.get_visible()] == list(map(str, ids))
        boxes = {kind: len(found.get_paths()) for kind, found in scene["boxes"][lane].items()}
        assert boxes == {kind: sum(tokenizer.kind(known[i]) == kind for i in ids) for kind in tokenizer.KINDS}
    assert len(scene["stars"].get_xdata()) == len(n["places"]) == 1
    rank = n["to_come"][0][0]
    assert scene["rows"][0].get_text().startswith(f"{rank}: ")
    np.testing.assert_array_equal(scene["curve"].get_ydata(), n["curve"])
    assert scene["here"].get_ydata()[0] == len(n["ids"])


def test_no_row_of_the_list_is_too_wide():
    explorer = tokenizer.explore()
    renderer, label = explorer.canvas.get_renderer(), explorer.scene["rows"][0]
    for cut in (True, False):
        known = tokenizer.tokens(cut)
        for rank, pair in enumerate(tokenizer.learned(cut)):
            parts = " + ".join(f"[{tokenizer.written(known[i])}]" for i in pair)
            label.set_text(f"{rank}: {parts} → {256 + rank}")
            assert label.get_window_extent(renderer).x1 <= 758, label.get_text()


@pytest.mark.parametrize("text", ["a" * 40, "好" * 20, "ab" + "😀" * 9])
def test_only_whole_characters_are_read(text):
    result = tokenizer.compute(text[: tokenizer.LONGEST], 0, True)
    read = bytes(result.numbers["bytes"]).decode()
    assert text.startswith(read) and len(read.encode()) <= tokenizer.LONGEST < len(read.encode()) + 4


def test_the_sentence_says_the_numbers():
    explorer = tokenizer.explore(text="the The", merges=0)
    assert explorer.sentence.startswith("0 of 240 merges: 7 bytes in 7 tokens, 1.00 bytes per token.")
    explorer.set(merges=tokenizer.MOST, cut=False)
    assert "words not cut" in explorer.sentence and "No other merge fits" in explorer.sentence
