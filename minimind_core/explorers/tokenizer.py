"""Explorer of notebook 13: a text falls into bytes, and merges join them to tokens, one after another."""

from collections import Counter
from functools import cache, lru_cache
from itertools import chain, pairwise

import numpy as np
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure

from ..bpe import count_pairs, merge, most_frequent, pre_tokenize, vocabulary
from . import style
from .shell import Explorer, Result, Slider, Text, Toggle
from .texts import drawable, fitting

# The merges are learned from this text, when the explorer is first shown. Written for it, so they are the same for all.
TEXT = """\
A model does not read letters. It reads tokens, and a token is a number. The tokenizer cuts the text into tokens: it
begins with the bytes, then it joins the two neighbors that stand side by side most often, and then again, and again.
So the word that is often in the text becomes one token, and the word that is rare stays in pieces.
The merges are learned once, from a text like this one. After that they are only applied: the first merge first, then
the second, then the third. The same word with the same merges gives the same tokens, every time and everywhere.
A space is a byte too. It goes to the word that follows, so " the" and "the" are two tokens and not one.
How many tokens are in a text? That depends on the merges. With no merges each byte is a token, and with many merges a
token is four or five letters long. Short texts cost less time: the model works once for each token.
The strawberry is red, the strawberry is sweet. How many letters are in "strawberry"? The model sees no letters, it
sees the tokens of the strawberry, and it has to learn by heart what letters are in them.
The numbers are cut as well: 10, 100, 1000, 2000, 2024, 2025, 2026, 100000. Who adds numbers has to see the digits.
你好，世界。你好，你们好！世界很大，我们的世界。 A sign of Chinese has three bytes, and an emoji has four: 😀 😀 🙂.
They begin as bytes that mean nothing alone. When the sign is often in the text, the merges make it one token.
What the model writes are tokens again: their bytes are put together, and when the bytes of a sign are there, the sign
is shown. Some of the tokens are words, some are parts of words, and some are parts of a sign. 世界 is a word of two
signs, and the world of the model is the tokens. The tokens are the letters of the model: it reads them, it writes
them, and it learns what they mean from the tokens around them. Is one token a word? Some are, and some are not.
"""
MOST = 240  # merges
LONGEST = 27  # bytes; what does not fit is left out
CELL, LEFT = 27, 16  # pixels: one byte, and where the first stands
SIZE = (style.WIDTH, 4.4)
CHARS, BYTES, NOW, LAST = 55, 75, 124, 202  # pixels from the top: middle of a line of text, top of a line of boxes
BOX = 40  # height of a box
ROWS = 4  # merges to come that are listed
KINDS = {"byte": ("before", "--"), "merged": ("after", "-"), "half": ("wrong", ":")}  # how a token's box is drawn

CONTROLS = {
    "text": Text("text", "tokens of 你好 and 😀!", LONGEST),
    "merges": Slider("merges", range(MOST + 1), 110),
    "cut": Toggle("cut into words", True),
}
PRESETS = {
    "bytes only": {"merges": 0},
    "space, capitals": {"text": "the The THE the", "merges": 2},
    "numbers": {"text": "1000, 2024 and 31415", "merges": 60},
    "strawberry": {"text": "How many r in strawberry", "merges": 60},
    "not cut": {"text": "it is often in the text", "merges": 60, "cut": False},
}
STILLS = {"bytes_only": PRESETS["bytes only"], "not_cut": PRESETS["not cut"]}


@cache
def learned(cut: bool = True) -> list[tuple[int, int]]:
    """MOST merges of TEXT, with words cut first or each line in one piece."""
    pieces = [piece for line in TEXT.splitlines() for piece in (pre_tokenize(line) if cut else [line])]
    words, merges = [list(piece.encode()) for piece in pieces], []
    for new_id in range(256, 256 + MOST):
        pairs = Counter()
        for word in words:
            pairs.update(count_pairs(word))
        merges.append(most_frequent(pairs))
        words = [merge(word, merges[-1], new_id) for word in words]
    return merges


@cache
def tokens(cut: bool) -> list[bytes]:
    """The bytes of every token."""
    return vocabulary(learned(cut))


@lru_cache(maxsize=64)
def steps(text: str, cut: bool) -> list[tuple[int, list[list[int]]]]:
    """(rank, ids of each piece after it) of every merge that takes place in the text; first rank -1, the bytes."""
    ranks = {pair: rank for rank, pair in enumerate(learned(cut))}
    pieces = [list(piece.encode()) for piece in (pre_tokenize(text) if cut else [text])]
    done = [(-1, pieces)]
    while found := [ranks[pair] for piece in pieces for pair in pairwise(piece) if pair in ranks]:
        rank = min(found)
        pieces = [merge(piece, learned(cut)[rank], 256 + rank) for piece in pieces]
        done.append((rank, pieces))
    return done


def found(pieces: list[list[int]], pair: tuple[int, int]) -> list[int]:
    """Where the pair stands: places among all tokens of the text. Two places of one pair do not overlap."""
    places, first = [], 0
    for piece in pieces:
        i = 0
        while i < len(piece) - 1:
            here = (piece[i], piece[i + 1]) == pair
            places += [first + i] if here else []
            i += 1 + here
        first += len(piece)
    return places


def kind(token: bytes) -> str:
    """ "byte", "merged", or "half" for a token that is no whole character."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return "half"
    return "byte" if len(token) == 1 else "merged"


@cache
def written(token: bytes) -> str:
    """A token as the picture shows it: its text; hexadecimal where it has none; a code point that the font lacks."""
    if kind(token) == "half" or (len(token) == 1 and not token.decode().isprintable()):
        return token.hex(" ").upper()
    shown = [f"U+{ord(char):04X}" if drawable(char) == "□" else drawable(char) for char in token.decode()]
    return "".join(f" {part} " if part.startswith("U+") else part for part in shown).strip()


def named(token: bytes) -> str:
    """A token as the sentence shows it: its text in quotes, or its bytes in hexadecimal."""
    text = token.decode(errors="replace")
    return repr(text) if kind(token) != "half" and text.isprintable() else f"<{token.hex(' ').upper()}>"


def compute(text: str, merges: int, cut: bool) -> Result:
    """The tokens after so many merges and after all; how their number falls; the merges to come."""
    read, known = fitting(text, LONGEST), tokens(cut)
    path = steps(read, cut)
    pieces = [pieces for rank, pieces in path if rank < merges][-1]
    ids, last = list(chain(*pieces)), list(chain(*path[-1][1]))
    to_come = [(rank, *learned(cut)[rank]) for rank, _ in path if rank >= merges]
    after = np.array([rank for rank, _ in path]) + 1  # so many merges: this one is among them
    lengths = np.array([sum(map(len, pieces)) for _, pieces in path])
    size = len(read.encode())
    halves = sum(kind(known[i]) == "half" for i in ids)
    numbers = {
        "bytes": list(read.encode()),
        "ids": ids,
        "last": last,
        "merges": merges,
        "cut": cut,
        "curve": lengths[np.searchsorted(after, np.arange(MOST + 1), side="right") - 1],
        "to_come": to_come[:ROWS],
        "places": found(pieces, to_come[0][1:]) if to_come else [],
        "left_out": max(len(to_come) - ROWS, 0),
    }
    words = f"{merges} of {MOST} merges{'' if cut else ', words not cut'}: {size} bytes in {len(ids)} "
    words += f"token{'s' * (len(ids) > 1)}, {size / len(ids):.2f} bytes per token"
    words += f"; {halves} of them no whole character." if halves else "."
    parts = [f" All merges: {len(last)}."] if merges < MOST else []
    if to_come:
        rank, left, right = to_come[0]
        parts.append(f" Next: rank {rank}, {named(known[left])} + {named(known[right])}, token {256 + rank}.")
    else:
        parts.append(" No other merge fits.")
    if len(read) < len(text):
        parts.append(f" Only {size} bytes are read.")
    shown = (named(known[i]).strip("'") if kind(known[i]) != "half" else named(known[i]) for i in ids)
    parts.append(f" Tokens: {'|'.join(shown)}")
    for part in parts:
        words += part if len(words) + len(part) <= 300 else ""
    return Result(numbers, words)


def draw(figure: Figure) -> dict:
    width, height = (100 * side for side in SIZE)
    figure.set_layout_engine("none")  # everything stands at its pixel
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axes.axis("off")
    axes.patch.set_visible(False)
    middle, bold = {"ha": "center", "va": "center"}, {"fontweight": "bold"}
    plain = {"va": "center", "parse_math": False}

    def line(y: float, **options) -> list:
        return [axes.text(0, y, "", parse_math=False, **middle, **options) for _ in range(LONGEST)]

    def boxes() -> dict:
        return {
            kind: axes.add_collection(
                PolyCollection([], **(style.fill(look, 0.16) | {"hatch": "", "linestyle": dashes, "linewidth": 1.3}))
            )
            for kind, (look, dashes) in KINDS.items()
        }

    scene = {
        "title": axes.text(LEFT, 14, "", fontsize=12, **plain, **bold),
        "spans": axes.add_collection(LineCollection([], colors=style.QUIET, linewidths=1)),
        "chars": line(CHARS),
        "bytes": line(BYTES, fontsize=9, color=style.QUIET),
        "now": axes.text(LEFT, NOW - 15, "", **plain),
        "boxes": [boxes(), boxes()],
        "texts": [line(NOW + 13), line(LAST + 13)],
        "ids": [line(NOW + 30, fontsize=9), line(LAST + 30, fontsize=9)],
        "pairs": axes.add_collection(LineCollection([], colors=style.color("highlight"), linewidths=3)),
        "stars": axes.plot([], [], **style.points("highlight"), markersize=11, markeredgecolor="white")[0],
        "rows": [axes.text(400, 304 + 25 * row, "", **plain) for row in range(ROWS)],
        "more": axes.text(400, 304 + 25 * ROWS, "", color=style.QUIET, **plain),
    }
    axes.text(LEFT, 34, "characters, and their bytes in hexadecimal", color=style.QUIET, **plain)
    axes.text(LEFT, LAST - 15, f"with all {MOST} merges", **plain)
    for x, (kind, (look, dashes)) in zip((274, 388, 562), KINDS.items(), strict=True):
        words = {"byte": "one byte", "merged": "made by a merge", "half": "no whole character"}[kind]
        axes.plot([x, x + 22], [NOW - 15, NOW - 15], color=style.color(look), linestyle=dashes, linewidth=2)
        axes.text(x + 27, NOW - 15, words, fontsize=10, va="center")
    axes.plot([396], [277], **style.points("highlight"), markersize=11, clip_on=False)
    axes.text(408, 278, "Next merges, rank: pair → token", fontsize=12, va="center", **bold)
    axes.set(xlim=(0, width), ylim=(height, 0))

    curve = figure.add_axes((56 / width, 46 / height, 310 / width, 108 / height))
    curve.set(xlim=(0, MOST), ylim=(0, LONGEST + 1), xticks=range(0, MOST + 1, 60), yticks=range(0, LONGEST, 10))
    curve.set(title="How many tokens", xlabel="merges")
    (scene["curve"],) = curve.plot([], [], **style.line("after"), drawstyle="steps-post")
    (scene["here"],) = curve.plot([], [], **style.points("highlight"), markersize=14, clip_on=False, zorder=4)
    return scene


def update(scene: dict, result: Result) -> None:
    n = result.numbers
    known, data, ids = tokens(n["cut"]), bytes(n["bytes"]), n["ids"]
    text = data.decode()
    scene["title"].set_text(f"{len(data)} bytes, {len(ids)} tokens: {len(data) / len(ids):.2f} bytes per token")
    scene["now"].set_text(f"with {n['merges']} merge{'s' * (n['merges'] != 1)}")

    chars = [char.encode() for char in text]
    places = spans_of(chars)
    scene["spans"].set_segments([[(a + 4, BYTES - 9), (b - 4, BYTES - 9)] for a, b in places if b - a > CELL])
    fill(scene["chars"], places, [written(char) for char in chars])
    fill(scene["bytes"], places, [char.hex(" ").upper().replace(" ", "  ") for char in chars])

    for lane, (top, lane_ids) in enumerate(((NOW, ids), (LAST, n["last"]))):
        spans = spans_of([known[i] for i in lane_ids])
        for kind_of_box, collection in scene["boxes"][lane].items():
            mine = [span for i, span in zip(lane_ids, spans, strict=True) if kind(known[i]) == kind_of_box]
            collection.set_verts([box(a, b, top) for a, b in mine])
        fill(scene["texts"][lane], spans, [written(known[i]) for i in lane_ids])
        fill(scene["ids"][lane], spans, [str(i) for i in lane_ids])

    spans = spans_of([known[i] for i in ids])
    marked = [(spans[i][0] + 3, spans[i + 1][1] - 3) for i in n["places"]]
    y = NOW + BOX + 6
    scene["pairs"].set_segments([[(a, y), (b, y)] for a, b in marked])
    scene["stars"].set_data([(a + b) / 2 for a, b in marked], [y] * len(marked))
    for row, label in enumerate(scene["rows"]):
        label.set_visible(row < max(len(n["to_come"]), 1))
        label.set_text("none: no other merge fits")
        if row < len(n["to_come"]):
            rank, left, right = n["to_come"][row]
            parts = " + ".join(f"[{written(known[i])}]" for i in (left, right))
            label.set_text(f"{rank}: {parts} → {256 + rank}")
    scene["more"].set_visible(n["left_out"] > 0)
    scene["more"].set_text(f"and {n['left_out']} more")
    scene["curve"].set_data(np.arange(MOST + 1), n["curve"])
    scene["here"].set_data([n["merges"]], [len(ids)])


def spans_of(parts: list[bytes]) -> list[tuple[int, int]]:
    """Left and right end of each part, in pixels."""
    ends = LEFT + CELL * np.cumsum([0, *map(len, parts)])
    return [(int(a), int(b)) for a, b in pairwise(ends)]


def box(left: int, right: int, top: int) -> list[tuple[int, int]]:
    return [(left + 1, top), (right - 1, top), (right - 1, top + BOX), (left + 1, top + BOX)]


def fill(labels: list, places: list[tuple[int, int]], texts: list[str]) -> None:
    """Put texts into the middle of their places; hide the labels that are left over."""
    for i, label in enumerate(labels):
        label.set_visible(i < len(texts))
        if i < len(texts):
            label.set_x(sum(places[i]) / 2)
            label.set_text(texts[i])


def explore(**start) -> Explorer:
    """Show the explorer. Keyword arguments are the values to begin with, named as in CONTROLS."""
    return Explorer(
        "tokenizer",
        controls=CONTROLS,
        presets=PRESETS,
        compute=compute,
        draw=draw,
        update=update,
        size=SIZE,
        start=start,
    )
