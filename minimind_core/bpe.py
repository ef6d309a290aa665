"""Byte-level BPE (byte pair encoding) by hand: ids 0 .. 255 are the bytes, merges[i] makes token 256 + i.

`minimind_core.tokenizer` does the same with the `tokenizers` library, faster and in MiniMind's file format.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

Pair = tuple[int, int]


@cache
def bytes_to_unicode() -> dict[int, str]:
    """Each byte's stand-in: a character that can be seen and stored in JSON. A file's vocabulary is spelled with them.

    A visible Latin-1 character stands for its own byte; the 68 others (space, line feed, control codes) follow from
    U+0100 on, so a space is 'Ġ'. A Chinese character is three bytes, hence three stand-ins: it looks like mojibake,
    and is not. Source: GPT-2, encoder.py.
    """
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def spell(token: bytes) -> str:
    """The token as a vocabulary file spells it: one stand-in a byte."""
    return "".join(bytes_to_unicode()[byte] for byte in token)


class _Classes(dict):
    """str.translate table: ASCII stays; any other letter becomes A, number 0, white space a tab, the rest !."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)[0]
        self[code] = {"L": "A", "N": "0"}.get(kind, "\t" if character.isspace() else "!")
        return self[code]


_CLASSES = _Classes((code, chr(code)) for code in range(128))
# GPT-2's '(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ on that copy of the text
_PIECE = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)


def pre_tokenize(text: str) -> list[str]:
    """Cut text into pieces; no merge crosses a cut. Joined, the pieces are the text.

    A piece is an English contraction's end, letters, numbers or other signs with at most one space before them, or
    white space. Python's `re` knows no \\p{L}, so the pattern is matched on a copy of the text in which each
    character beyond ASCII is replaced by one of its class. Source: GPT-2, encoder.py.
    """
    return [text[match.start() : match.end()] for match in _PIECE.finditer(text.translate(_CLASSES))]


def count_pairs(ids: Sequence[int]) -> Counter[Pair]:
    """How often each pair of neighbors occurs. Every place counts: "aaaaa" holds (a, a) 4 times; merge can take 2."""
    return Counter(pairwise(ids))


def most_frequent(pairs: Mapping[Pair, int]) -> Pair:
    """The pair to merge next. Among equals: the one whose left token comes first, then whose right token does.

    Bytes come before merged tokens, in the order of their stand-ins (visible characters first); merged tokens in the
    order of their making. It is the order of ids in a file, so the library's rule gives the same pair.
    """
    most = max(pairs.values())
    return min((pair for pair, count in pairs.items() if count == most), key=lambda pair: tuple(map(_place, pair)))


def merge(ids: Sequence[int], pair: Pair, new_id: int) -> list[int]:
    """ids with each occurrence of the pair replaced by new_id, from left to right and without overlap."""
    merged, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            merged.append(new_id)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


def train_merges(texts: Iterable[str], number: int) -> list[Pair]:
    """Learn merges: again and again, the most frequent pair of neighbors becomes one token.

    Returns at most `number` pairs, fewer if nothing is left to merge; merges[i] makes token 256 + i. Equal pieces are
    counted once, with their number. Source: Sennrich et al. 2016, algorithm 1, on bytes.
    """
    pieces = Counter(piece for text in several(texts) for piece in pre_tokenize(text))
    words, times = [list(piece.encode()) for piece in pieces], list(pieces.values())
    pairs, seen_in = Counter(), defaultdict(set)

    def count(word: int, sign: int) -> None:
        for pair, n in count_pairs(words[word]).items():
            pairs[pair] += sign * n * times[word]
            seen_in[pair].add(word)

    for word in range(len(words)):
        count(word, +1)
    merges = []
    while len(merges) < number and any(pairs.values()):
        pair = most_frequent(pairs)
        for word in seen_in.pop(pair):  # only these words change
            count(word, -1)
            words[word] = merge(words[word], pair, 256 + len(merges))
            count(word, +1)
        del pairs[pair]
        merges.append(pair)
    return merges


def vocabulary(merges: Sequence[Pair]) -> list[bytes]:
    """The bytes of every token: 256 single bytes, then of merges[i] the bytes of its two parts."""
    tokens = [bytes([byte]) for byte in range(256)]
    for left, right in merges:
        tokens.append(tokens[left] + tokens[right])
    return tokens


def merge_by_rank(ids: Sequence[int], ranks: Mapping[Pair, int]) -> list[int]:
    """Apply merges to the ids of one piece, the earliest learned first: ranks[pair] is the pair's place in training."""
    ids = list(ids)
    while len(ids) > 1:
        pair = min(pairwise(ids), key=lambda pair: ranks.get(pair, len(ranks)))
        if pair not in ranks:
            break
        ids = merge(ids, pair, 256 + ranks[pair])
    return ids


def encode(text: str, merges: Sequence[Pair]) -> list[int]:
    """Text to ids. A part of the merges, merges[:n], encodes as a smaller vocabulary would."""
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    return [token for piece in pre_tokenize(text) for token in merge_by_rank(piece.encode(), ranks)]


def decode(ids: Iterable[int], merges: Sequence[Pair]) -> str:
    """Ids to text. Bytes that are no whole character become U+FFFD."""
    tokens = vocabulary(merges)
    return b"".join(tokens[token] for token in ids).decode(errors="replace")


@cache
def _byte_places() -> list[int]:
    places = [0] * 256
    for place, byte in enumerate(bytes_to_unicode()):
        places[byte] = place
    return places


def _place(token: int) -> int:
    return _byte_places()[token] if token < 256 else token


def several(texts: Iterable[str]) -> Iterable[str]:
    """texts, unless they are one string, which would be read letter by letter: then TypeError."""
    if isinstance(texts, str):
        raise TypeError("texts is one string; give a list of them: [text]")
    return texts
