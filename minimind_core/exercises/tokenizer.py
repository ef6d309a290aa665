"""Exercises of 13_tokenizer: the pairs, a merge, encoding by rank, the spelling of bytes, and streaming."""

import codecs
from collections import Counter
from itertools import pairwise

from .. import bpe
from .framework import Exercise, case

# 1. count_pairs ------------------------------------------------------------------------------------------------------

count = Exercise(
    name="13_tokenizer.count_pairs",
    title="How often each pair of neighbors occurs",
    signature="count_pairs(ids)",
    reference=lambda ids: dict(bpe.count_pairs(ids)),
    cases=[
        case("two tokens", [1, 2]),
        case("one token: no pair", [1]),
        case("no token", []),
        case("five equal tokens", [1, 1, 1, 1, 1]),
        case("both orders", [1, 2, 1, 2, 2]),
        case("the last token is the first one again", [3, 1, 4, 1, 5, 3]),
        case("the bytes of 'banana bandana'", list(b"banana bandana")),
    ],
)


@count.mutant(
    "pairs are counted without overlap",
    "every place where a pair stands counts, so five equal tokens hold it four times. Only merging can't overlap.",
)
def without_overlap(ids):
    counts, last = {}, {}
    for i, pair in enumerate(pairwise(ids)):
        if last.get(pair, -2) < i - 1:
            counts[pair] = counts.get(pair, 0) + 1
            last[pair] = i
    return counts


@count.mutant(
    "the list was cut into pairs: places 0-1, 2-3, 4-5",
    "a token is the left of one pair and the right of another. Otherwise a shift by one would change all counts.",
)
def cut_into_pairs(ids):
    return dict(Counter(zip(ids[::2], ids[1::2], strict=False)))


@count.mutant(
    "the order inside a pair is lost: (1, 2) and (2, 1) were counted together",
    "a merge puts left before right. 'th' and 'ht' are different tokens.",
)
def order_lost(ids):
    return dict(Counter(tuple(sorted(pair)) for pair in pairwise(ids)))


@count.mutant(
    "the pairs are written right to left: (second, first)",
    "merge looks for (left, right) in the order of the text.",
)
def turned_around(ids):
    return dict(Counter((right, left) for left, right in pairwise(ids)))


@count.mutant(
    "each pair was counted once, however often it occurs",
    "the most frequent pair is wanted, and then all would be equally frequent.",
)
def only_present(ids):
    return dict.fromkeys(pairwise(ids), 1)


@count.mutant(
    "every count is one too low: it starts from 0 at the first place",
    "the first place counts too: counts.get(pair, 0) + 1.",
)
def from_zero(ids):
    return {pair: n - 1 for pair, n in Counter(pairwise(ids)).items()}


@count.mutant(
    "the last pair is missing",
    "n tokens have n - 1 pairs: i runs over range(len(ids) - 1), and range leaves out its end.",
)
def last_missing(ids):
    return dict(Counter(pairwise(ids[:-1])))


@count.mutant(
    "the first pair is missing",
    "i begins at 0: the pair (ids[0], ids[1]) counts as well.",
)
def first_missing(ids):
    return dict(Counter(pairwise(ids[1:])))


@count.mutant(
    "the last token was paired with the first",
    "a text is no ring: nothing follows its last token. In Python ids[-1] is the last item, so ids[i - 1] at i = 0 "
    "does not fail.",
)
def as_a_ring(ids):
    return dict(Counter((ids[i - 1], ids[i]) for i in range(len(ids))))


@count.mutant(
    "single tokens were counted, not pairs",
    "a merge joins two neighbors, so it is the pairs that compete.",
)
def single_tokens(ids):
    return dict(Counter(ids))


@count.mutant(
    "all pairs of tokens were counted, near or far",
    "only neighbors can be merged.",
)
def not_only_neighbors(ids):
    return dict(Counter((left, right) for i, left in enumerate(ids) for right in ids[i + 1 :]))


@count.mutant(
    "pairs of two equal tokens were left out",
    "'ll', 'ee', two spaces: equal neighbors are pairs like any others.",
)
def equal_left_out(ids):
    return dict(Counter((left, right) for left, right in pairwise(ids) if left != right))


@count.mutant(
    "the counts were divided by the number of pairs",
    "shares of one text can't be added to those of another. Wanted are whole numbers.",
)
def shares(ids):
    return {pair: n / (len(ids) - 1) for pair, n in Counter(pairwise(ids)).items()}


@count.mutant(
    "the pair behind the last token was asked for",
    "ids[i + 1] does not exist for the last i. n tokens have n - 1 pairs: range(len(ids) - 1).",
)
def beyond_the_end(ids):
    counts = {}
    for i in range(len(ids)):
        pair = (ids[i], ids[i + 1])
        counts[pair] = counts.get(pair, 0) + 1
    return counts


@count.mutant(
    "a pair that was not met before has no count to add to",
    "counts[pair] += 1 reads the old count first, and there is none. counts.get(pair, 0) gives 0 then; so do Counter "
    "and defaultdict(int).",
)
def no_first_count(ids):
    counts = {}
    for pair in pairwise(ids):
        counts[pair] += 1
    return counts


@count.mutant(
    "a list is used as a key",
    "a list can change, so a dict takes none. ids[i : i + 2] is a list; a pair is a tuple: (ids[i], ids[i + 1]).",
)
def list_as_key(ids):
    counts = {}
    for i in range(len(ids) - 1):
        counts[ids[i : i + 2]] = 1
    return counts


@count.mutant(
    "every count is one too high: it starts from 1 and adds 1",
    "before the first place a pair was counted 0 times: counts.get(pair, 0) + 1.",
)
def from_one(ids):
    return {pair: n + 1 for pair, n in Counter(pairwise(ids)).items()}


# 2. merge ------------------------------------------------------------------------------------------------------------

merge = Exercise(
    name="13_tokenizer.merge",
    title="A merge: each occurrence of a pair becomes one token",
    signature="merge(ids, pair, new_id)",
    reference=bpe.merge,
    cases=[
        case("the pair alone", [1, 2], (1, 2), 256),
        case("three equal tokens", [1, 1, 1], (1, 1), 256),
        case("five equal tokens", [1, 1, 1, 1, 1], (1, 1), 256),
        case("the pair turned around stays", [2, 1, 3], (1, 2), 256),
        case("two occurrences, with others around", [3, 1, 2, 4, 1, 2, 3], (1, 2), 256),
        case("a token of the pair alone", [1, 3, 2, 1], (1, 2), 256),
        case("no token", [], (1, 2), 256),
        case("numbers that contain others", [11, 2, 1, 21, 1, 2], (1, 2), 256),
        case("a pair with a merged token", [256, 3, 256, 256, 3], (256, 3), 257),
    ],
)


def walk(ids, pair, step=2, most=None, keep=()):
    """Merge from left to right. step: how far to go on after a merge; most: how many; keep: put behind the new id."""

    def merged(new_id):
        result, i, done = [], 0, 0
        while i < len(ids):
            if tuple(ids[i : i + 2]) == pair and (most is None or done < most):
                result += [new_id, *keep]
                i, done = i + step, done + 1
            else:
                result.append(ids[i])
                i += 1
        return result

    return merged


@merge.mutant(
    "after a merge it goes on by one token, so the right one stays",
    "the new token stands for both: skip both, i += 2. Otherwise the text grows, and decoding says letters twice.",
)
def right_stays(ids, pair, new_id):
    return walk(ids, pair, step=1)(new_id)


@merge.mutant(
    "only the first occurrence was merged",
    "go on to the end: a merge belongs to the whole text.",
)
def only_first(ids, pair, new_id):
    return walk(ids, pair, most=1)(new_id)


@merge.mutant(
    "it merges from right to left",
    "with three equal tokens the first two belong together, not the last two. Encoding must cut as training did.",
)
def from_the_right(ids, pair, new_id):
    return walk(ids[::-1], pair[::-1])(new_id)[::-1]


@merge.mutant(
    "both tokens became the new one, so it stands there twice",
    "a merge makes the text shorter: two tokens in, one out.",
)
def twice(ids, pair, new_id):
    return walk(ids, pair, keep=(new_id,))(new_id)


@merge.mutant(
    "the right token is dropped where nothing was merged, or the left one stays where it was",
    "the new id takes the place of both, left and right.",
)
def left_stays(ids, pair, new_id):
    result, i = [], 0
    while i < len(ids):
        result.append(ids[i])
        if tuple(ids[i : i + 2]) == pair:
            result.append(new_id)
            i += 1
        i += 1
    return result


@merge.mutant(
    "every token that occurs in the pair was replaced, also alone",
    "only the two side by side, left before right, become the new token.",
)
def each_token(ids, pair, new_id):
    return [new_id if token in pair else token for token in ids]


@merge.mutant(
    "the pair is merged in both orders",
    "(1, 2) is not (2, 1): the new token would stand for 'th' and for 'ht', and decoding could not tell.",
)
def both_orders(ids, pair, new_id):
    result, i = [], 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) in (pair, pair[::-1])
        result.append(new_id if found else ids[i])
        i += 1 + found
    return result


@merge.mutant(
    "the last token is lost",
    "a last token that belongs to no pair is kept as it is. range(len(ids) - 1) never comes to it.",
)
def last_lost(ids, pair, new_id):
    result, i = [], 0
    while i < len(ids) - 1:
        found = (ids[i], ids[i + 1]) == tuple(pair)
        result.append(new_id if found else ids[i])
        i += 1 + found
    return result


@merge.mutant(
    "the list was joined to a text and the pair replaced in it",
    "in '11,2' stands '1,2'. Compare numbers, not their digits.",
)
def as_text(ids, pair, new_id):
    text = ",".join(map(str, ids)).replace(",".join(map(str, pair)), str(new_id))
    return [int(part) for part in text.split(",") if part]


@merge.mutant(
    "overlapping occurrences were all merged: three equal tokens became two new ones",
    "a token can go into one merge only. The new tokens would stand for more bytes than the text has.",
)
def with_overlap(ids, pair, new_id):
    result = []
    for i, token in enumerate(ids):
        if tuple(ids[i : i + 2]) == pair:
            result.append(new_id)
        elif not (i and tuple(ids[i - 1 : i + 1]) == pair):
            result.append(token)
    return result


@merge.mutant(
    "the pair was taken out, and the new token put at the end",
    "the new token stands where the pair stood. Order is all that a text has.",
)
def at_the_end(ids, pair, new_id):
    rest = walk(ids, pair)(None)
    return [token for token in rest if token is not None] + [new_id] * rest.count(None)


@merge.mutant(
    "the pair was removed and nothing put in its place",
    "the new id stands for it; otherwise the text is lost.",
)
def removed(ids, pair, new_id):
    return [token for token in walk(ids, pair)(None) if token is not None]


@merge.mutant(
    "it jumps over two tokens where nothing is merged",
    "the pair may begin at any place, also at an odd one. Without a merge go on by one.",
)
def by_twos(ids, pair, new_id):
    result = []
    for i in range(0, len(ids), 2):
        two = ids[i : i + 2]
        result += [new_id] if tuple(two) == pair else two
    return result


@merge.mutant(
    "nothing was merged",
    "in Python a list never equals a tuple, and pair is a tuple: compare (ids[i], ids[i + 1]) with it.",
)
def list_against_tuple(ids, pair, new_id):
    return list(ids)


@merge.mutant(
    "it looks for a right neighbor where there is none",
    "ids[i + 1] does not exist for the last token, nor at the end of a list that a merge has made shorter. Ask first: "
    "i + 1 < len(ids). A last token is kept as it is.",
)
def no_neighbor(ids, pair, new_id):
    result, i = [], 0
    while i < len(ids):
        found = ids[i] == pair[0] and ids[i + 1] == pair[1]
        result.append(new_id if found else ids[i])
        i += 1 + found
    return result


@merge.mutant(
    "the new token is always 256",
    "its number is an argument, new_id: each merge makes another token.",
)
def always_256(ids, pair, new_id):
    return bpe.merge(ids, pair, 256)


@merge.mutant(
    "the last token is added once more after a merge has used it",
    "a last token that belongs to a pair is in the new one already. Keep it only if nothing was merged there.",
)
def last_again(ids, pair, new_id):
    merged = last_lost(ids, pair, new_id)
    return merged + ids[-1:]


# 3. merge_by_rank ----------------------------------------------------------------------------------------------------

RANKED = {(2, 3): 0, (1, 2): 1, (257, 3): 2}  # 256 is 2 3, 257 is 1 2, 258 is 1 2 3
ABC = {(1, 2): 0, (256, 3): 1, (257, 257): 2}  # 256 is 1 2, 257 is 1 2 3, 258 is 1 2 3 1 2 3
EQUAL = {(1, 1): 0, (256, 256): 1}

by_rank = Exercise(
    name="13_tokenizer.merge_by_rank",
    title="Encoding: the pair with the lowest rank is merged first",
    signature="merge_by_rank(ids, ranks)",
    reference=bpe.merge_by_rank,
    provides={"count_pairs": count.reference, "merge": bpe.merge},
    cases=[
        case("one merge", [1, 2], {(1, 2): 0}),
        case("a merge that was learned second", [1, 2], {(2, 3): 0, (1, 2): 1}),
        case("two merges that compete", [1, 2, 3], RANKED),
        case("the same, in the other order", [1, 2, 3], {(1, 2): 0, (2, 3): 1}),
        case("a merge of a merged token", [1, 2, 3], ABC),
        case("a merged token on the right", [1, 2, 3], {(2, 3): 0, (1, 256): 1, (1, 2): 2}),
        case("ranks that are not listed in their order", [1, 2, 3], {(1, 2): 1, (2, 3): 0}),
        case("one byte", [1], RANKED),
        case("nothing to merge", [3, 2, 1], RANKED),
        case("the earlier merge is the rarer one", [1, 2, 3, 1, 2, 4, 1, 2], RANKED),
        case("three levels", [1, 2, 3, 1, 2, 3], ABC),
        case("seven equal bytes", [1] * 7, EQUAL),
        case("no bytes", [], RANKED),
        case("no merges", [1, 2, 3], {}),
        case("two merges far from each other", [5, 1, 2, 9, 2, 3, 5], RANKED),
    ],
)


def repeatedly(ids, ranks, choose, new=lambda rank, done: 256 + rank, most=10**6):
    """Merge the pair that `choose` picks from those that have a rank, until there is none."""
    ids, done = list(ids), 0
    while done < most and (known := [pair for pair in pairwise(ids) if pair in ranks]):
        pair = choose(known)
        ids, done = bpe.merge(ids, pair, new(ranks[pair], done)), done + 1
    return ids


@by_rank.mutant(
    "from the left, the longest token that fits was taken",
    "a vocabulary can hold a token that its own merges don't reach here, since an earlier merge took a part away. Then "
    "the model sees tokens that it never saw in training.",
    "WordPiece, BERT's tokenizer, encodes so.",
)
def longest_match(ids, ranks):
    parts = {(byte,): byte for byte in range(256)}
    spelled = {byte: (byte,) for byte in range(256)}
    for (left, right), rank in sorted(ranks.items(), key=lambda item: item[1]):
        spelled[256 + rank] = spelled[left] + spelled[right]
        parts[spelled[256 + rank]] = 256 + rank
    result, i = [], 0
    while i < len(ids):
        size = max(n for n in range(1, len(ids) - i + 1) if tuple(ids[i : i + n]) in parts)
        result.append(parts[tuple(ids[i : i + size])])
        i += size
    return result


@by_rank.mutant(
    "the first pair from the left that has a rank was merged, whatever its rank",
    "merges are applied in the order in which they were learned, wherever they stand.",
)
def leftmost(ids, ranks):
    return repeatedly(ids, ranks, lambda known: known[0])


@by_rank.mutant(
    "the word's pairs were gone through once, from the left, and each that has a rank was merged",
    "of all pairs the one with the lowest rank is first. Its merge makes new neighbors: then look at all pairs again.",
)
def one_pass(ids, ranks):
    merged = list(ids)
    for pair in pairwise(ids):
        if pair in ranks:
            merged = bpe.merge(merged, pair, 256 + ranks[pair])
    return merged


@by_rank.mutant(
    "the pair with the highest rank goes first",
    "rank 0 is the merge learned first: take the minimum, not the maximum.",
)
def highest_rank(ids, ranks):
    return repeatedly(ids, ranks, lambda known: max(known, key=ranks.get))


@by_rank.mutant(
    "the pair that is most frequent in this text was merged first",
    "counting belongs to training. When a text is encoded, only the rank decides: the same word must become the same "
    "tokens in every text.",
)
def most_frequent(ids, ranks):
    return repeatedly(ids, ranks, lambda known: max(known, key=lambda pair: (known.count(pair), -ranks[pair])))


@by_rank.mutant(
    "it stops after one merge",
    "go on until no pair of neighbors has a rank.",
)
def one_merge(ids, ranks):
    return repeatedly(ids, ranks, lambda known: min(known, key=ranks.get), most=1)


@by_rank.mutant(
    "the new token is the rank itself, without 256",
    "0 to 255 are the bytes. Merge number 0 makes token 256.",
)
def no_offset(ids, ranks):
    return repeatedly(ids, ranks, lambda known: min(known, key=ranks.get), lambda rank, done: rank)


@by_rank.mutant(
    "new tokens are numbered as they come up in this text",
    "a token's number is fixed in training: 256 + rank. The row of the embedding hangs on it.",
)
def numbered_anew(ids, ranks):
    return repeatedly(ids, ranks, lambda known: min(known, key=ranks.get), lambda rank, done: 256 + done)


@by_rank.mutant(
    "new tokens are numbered from 257 on",
    "rank 0 makes token 256, since the bytes end at 255.",
)
def off_by_one(ids, ranks):
    return repeatedly(ids, ranks, lambda known: min(known, key=ranks.get), lambda rank, done: 257 + rank)


@by_rank.mutant(
    "rank 0 was taken for no rank",
    "in Python 0 counts as false. Ask `pair in ranks`, or `is not None`.",
)
def zero_is_false(ids, ranks):
    return repeatedly(
        ids, {pair: rank for pair, rank in ranks.items() if rank}, lambda known: min(known, key=ranks.get)
    )


@by_rank.mutant(
    "merged tokens are not merged any further",
    "look at the new neighbors after each merge: that is how long tokens come about.",
)
def bytes_only(ids, ranks):
    seen = {pair: rank for pair, rank in ranks.items() if max(pair) < 256}
    return repeatedly(ids, seen, lambda known: min(known, key=ranks.get))


@by_rank.mutant(
    "of each pair only the first occurrence is merged",
    "a merge takes every place where its pair stands.",
)
def first_only(ids, ranks):
    ids = list(ids)
    for pair, rank in sorted(ranks.items(), key=lambda item: item[1]):
        ids = walk(ids, pair, most=1)(256 + rank)
    return ids


@by_rank.mutant(
    "it gives up when the first pair from the left has no rank",
    "look at all pairs. Only when none of them has a rank is there nothing left to do.",
)
def gives_up(ids, ranks):
    ids = list(ids)
    while len(ids) > 1 and (ids[0], ids[1]) in ranks:
        pair = min((pair for pair in pairwise(ids) if pair in ranks), key=ranks.get)
        ids = bpe.merge(ids, pair, 256 + ranks[pair])
    return ids


@by_rank.mutant(
    "it does not stop when no pair has a rank",
    "most texts end with neighbors that were never merged. Then the work is done: break.",
)
def no_stop(ids, ranks):
    ids = list(ids)
    while len(ids) > 1:
        pair = min(pairwise(ids), key=lambda pair: ranks.get(pair, len(ranks)))
        ids = bpe.merge(ids, pair, 256 + ranks[pair])
    return ids


@by_rank.mutant(
    "the merges were gone through as the dict lists them",
    "the rank decides, not the place in the dict: of all neighbors that have one, take the lowest rank first.",
)
def as_listed(ids, ranks):
    for pair, rank in ranks.items():
        ids = bpe.merge(ids, pair, 256 + rank)
    return list(ids)


@by_rank.mutant(
    "the lowest rank of no pairs at all was asked for",
    "one token or none has no neighbors, and min of nothing is an error. Stop while fewer than two tokens are left.",
)
def min_of_nothing(ids, ranks):
    while True:
        pair = min(list(pairwise(ids)), key=lambda pair: ranks.get(pair, len(ranks)))
        if pair not in ranks:
            return ids
        ids = bpe.merge(ids, pair, 256 + ranks[pair])


@by_rank.mutant(
    "a pair without a rank was looked up in ranks",
    "most pairs were never merged in training, and ranks[pair] stops with a KeyError then. Ask `pair in ranks` first, "
    "or give ranks.get a number above all ranks.",
)
def rank_not_asked(ids, ranks):
    ids = list(ids)
    while len(ids) > 1:
        pair = min(pairwise(ids), key=lambda pair: ranks[pair])
        ids = bpe.merge(ids, pair, 256 + ranks[pair])
    return ids


# 4. spell ------------------------------------------------------------------------------------------------------------

EVERY = bytes(range(256))

spell = Exercise(
    name="13_tokenizer.spell",
    title="A token as the vocabulary file writes it: one visible character for each byte",
    signature="spell(token)",
    reference=bpe.spell,
    cases=[
        case("a letter", b"a"),
        case("a space and a letter", b" a"),
        case("line feed and tab", b"\n\t"),
        case("'é', two bytes", "é".encode()),
        case("'你', three bytes", "你".encode()),
        case("byte 127, delete", b"\x7f"),
        case("bytes 160 and 173, no-break space and soft hyphen", b"\xa0\xad"),
        case("bytes 126 and 161, the last and first around the gap", b"\x7e\xa1"),
        case("no byte", b""),
        case("all 256 bytes", EVERY),
    ],
)


def stood_in(token, visible, stand_in):
    """Visible bytes as themselves; of the others the n-th, counted from 0, becomes stand_in(n, byte)."""
    hidden = [byte for byte in range(256) if byte not in visible]
    return "".join(chr(byte) if byte in visible else stand_in(hidden.index(byte), byte) for byte in token)


SEEN = frozenset([*range(33, 127), *range(161, 173), *range(174, 256)])


def nth(n, byte):
    return chr(256 + n)


@spell.mutant(
    "a hidden byte became chr(256 + byte), not the next free character",
    "the hidden bytes are numbered among themselves. For 0 to 32 both agree; byte 127 is the 34th, chr(289).",
)
def by_byte(token):
    return stood_in(token, SEEN, lambda n, byte: chr(256 + byte))


@spell.mutant(
    "the hidden bytes of this token were counted, not those of all 256",
    "a byte must be spelled alike in every token: a space is always 'Ġ'. Make the table of all 256 bytes first.",
)
def counted_in_token(token):
    hidden = [place for place, byte in enumerate(token) if byte not in SEEN]
    return "".join(chr(256 + hidden.index(i)) if i in hidden else chr(byte) for i, byte in enumerate(token))


@spell.mutant(
    "the token was decoded as UTF-8, and only the space got a stand-in",
    "a line feed is hidden too, and half a character has no text. The spelling goes byte by byte.",
)
def only_the_space(token):
    return token.decode(errors="replace").replace(" ", "Ġ")


@spell.mutant(
    "every byte is its own Latin-1 character",
    "a space, a line feed or a delete can't be seen, and a file of words can't hold them safely.",
)
def latin_1(token):
    return token.decode("latin-1")


@spell.mutant(
    "the token was decoded as UTF-8",
    "half a character has no text. The spelling goes byte by byte, so that every token has one.",
)
def as_utf_8(token):
    return token.decode(errors="replace")


@spell.mutant(
    "only ASCII stands for itself",
    "the visible half of Latin-1, 161 to 255 without 173, stands for itself too: 'é' is spelled 'Ã©'.",
)
def ascii_only(token):
    return stood_in(token, set(range(33, 127)), nth)


@spell.mutant(
    "only ASCII stands for itself, and every other byte became chr(256 + byte)",
    "161 to 255 without 173 can be seen and stand for themselves. The others are numbered among themselves: the n-th "
    "becomes chr(256 + n).",
)
def ascii_by_byte(token):
    return stood_in(token, set(range(33, 127)), lambda n, byte: chr(256 + byte))


@spell.mutant(
    "the space was kept as a space",
    "a vocabulary file separates the two parts of a merge by a space, so no token may contain one: it is 'Ġ'.",
)
def space_kept(token):
    return stood_in(token, SEEN | {32}, nth)


@spell.mutant(
    "the space became '▁'",
    "byte-level BPE writes it 'Ġ', the character 256 + 32.",
    "SentencePiece, for Llama 2 and others, marks a space by '▁'.",
)
def low_line(token):
    return bpe.spell(token).replace("Ġ", "▁")


@spell.mutant(
    "byte 127 was taken for visible",
    "127 is delete, a control code. range(33, 127) ends before it.",
)
def delete_visible(token):
    return stood_in(token, SEEN | {127}, nth)


@spell.mutant(
    "byte 173, the soft hyphen, was taken for visible",
    "it shows only where a line breaks. Leave it out, and the last hidden byte gets chr(323).",
)
def soft_hyphen_visible(token):
    return stood_in(token, SEEN | {173}, nth)


@spell.mutant(
    "byte 160, the no-break space, was taken for visible",
    "it looks like a space. The visible ones begin at 161.",
)
def no_break_space_visible(token):
    return stood_in(token, SEEN | {160}, nth)


@spell.mutant(
    "byte 126, '~', or byte 255, 'ÿ', was taken for hidden: a range ended one too early",
    "range leaves out its end: range(33, 127) and range(174, 256) go up to 126 and 255.",
)
def ends_too_early(token):
    return stood_in(token, SEEN - {126, 255}, nth)


@spell.mutant(
    "the stand-ins begin at 257",
    "the first hidden byte, 0, becomes chr(256), so that the space becomes 'Ġ', chr(288).",
)
def from_257(token):
    return stood_in(token, SEEN, lambda n, byte: chr(257 + n))


@spell.mutant(
    "hidden bytes were written in hexadecimal",
    "one byte, one character: otherwise nobody can tell where a byte ends, and the library does not read it.",
)
def hexadecimal(token):
    return stood_in(token, SEEN, lambda n, byte: f"<0x{byte:02X}>")


@spell.mutant(
    "hidden bytes were left out",
    "then ' the' and 'the' are spelled alike, and the space is lost.",
)
def left_out(token):
    return stood_in(token, SEEN, lambda n, byte: "")


@spell.mutant(
    "bytes that are no UTF-8 were decoded as text",
    "a token may hold half a character, and .decode() stops there. The spelling goes byte by byte: for byte in token.",
)
def strict_utf_8(token):
    return "".join(bpe.spell(character.encode()) for character in token.decode())


# 5. stream -----------------------------------------------------------------------------------------------------------


def stream_reference(tokens):
    """What to show after each token, and what at the end. tokens: list of bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [*(decoder.decode(token) for token in tokens), decoder.decode(b"", final=True)]


stream = Exercise(
    name="13_tokenizer.stream",
    title="Text from tokens as they come, never half a character",
    signature="stream(tokens)",
    reference=stream_reference,
    cases=[
        case("one letter", [b"a"]),
        case("'é' in two tokens", [b"\xc3", b"\xa9"]),
        case("'犇' in two tokens, then '!'", [b"\xe7\x8a", b"\x87", b"!"]),
        case("'😀' in three tokens", [b"\xf0\x9f", b"\x98", b"\x80"]),
        case("a token with the end of '好' and the beginning of '你'", [b"\xe5\xa5", b"\xbd\xe4\xbd", b"\xa0"]),
        case("words", [b"The", b" cat", b" sat"]),
        case("the stream ends inside '犇'", [b"ok", b"\xe7\x8a"]),
        case("no token", []),
        case("a token of no bytes", [b"a", b"", b"b"]),
        case("the character U+FFFD itself", [b"\xef\xbf", b"\xbd", b"a"]),
        case("a byte that no character begins with", [b"\xff", b"a", b"b"]),
    ],
)


@stream.mutant(
    "each token was decoded alone, with U+FFFD for what is no whole character",
    "the halves of a character belong together. Keep the bytes, not the text, until the rest has come.",
)
def alone(tokens):
    return [*(token.decode(errors="replace") for token in tokens), ""]


@stream.mutant(
    "incomplete bytes were thrown away",
    "Chinese and emoji would vanish from the answer without a trace.",
)
def ignored(tokens):
    return [*(token.decode(errors="ignore") for token in tokens), ""]


def buffered(tokens, ready, emptied=True):
    """Show the buffer whenever ready(buffer) says so; at the end the rest."""
    shown, buffer = [], b""
    for token in tokens:
        buffer += token
        done = ready(buffer)
        shown.append(buffer.decode(errors="replace") if done else "")
        buffer = b"" if done and emptied else buffer
    return [*shown, buffer.decode(errors="replace") if emptied else ""]


def whole(buffer):
    try:
        buffer.decode()
    except UnicodeDecodeError:
        return False
    return True


@stream.mutant(
    "nothing is shown until all that waits is valid",
    "a character that is finished may be shown while the next one waits. And a single invalid byte, which an untrained "
    "model writes soon, would hold back all the rest.",
)
def all_or_nothing(tokens):
    return buffered(tokens, whole)


@stream.mutant(
    "a byte that no character begins with holds back all that follows",
    "it will never become valid: it is U+FFFD at once, and the text goes on. Untrained models write such bytes; "
    "codecs knows the difference between invalid and not yet complete.",
)
def blocked(tokens):
    shown, buffer = [], b""
    for token in tokens:
        buffer += token
        size = max(n for n in range(len(buffer) + 1) if whole(buffer[:n]))
        shown.append(buffer[:size].decode())
        buffer = buffer[size:]
    return [*shown, buffer.decode(errors="replace")]


@stream.mutant(
    "nothing is shown while the decoded text contains U+FFFD",
    "U+FFFD may stand in the text itself, and a finished character waits for the next one.",
    "many chat programs do so: it is short, and ordinary text comes at most a token later.",
)
def until_no_replacement(tokens):
    return buffered(tokens, lambda buffer: "\ufffd" not in buffer.decode(errors="replace"))


@stream.mutant(
    "nothing is shown while the decoded text ends in U+FFFD",
    "the last whole character waits although it is complete, and a real U+FFFD holds back what follows it.",
    "Hugging Face's streaming does so.",
)
def until_end_is_whole(tokens):
    return buffered(tokens, lambda buffer: not buffer.decode(errors="replace").endswith("\ufffd"))


@stream.mutant(
    "what waits at the end is lost",
    "a cut character is shown as U+FFFD, so that the reader sees that something is missing.",
)
def not_flushed(tokens):
    return [*stream_reference(tokens)[:-1], ""]


@stream.mutant(
    "the result at the end is missing: one item for each token, and no more",
    "after the last token comes a last item, for bytes that still wait; mostly it is ''.",
)
def no_last_item(tokens):
    return stream_reference(tokens)[:-1]


@stream.mutant(
    "the bytes were not taken out of the buffer, so the text is said again and again",
    "show only what is new: after showing, the buffer is empty, or holds the beginning of a character.",
)
def said_again(tokens):
    return buffered(tokens, whole, emptied=False)


@stream.mutant(
    "after each token all bytes so far were decoded and returned",
    "only what the new token completes is wanted, and half a character is not shown, not even as U+FFFD: it waits.",
)
def all_so_far(tokens):
    return [*(b"".join(tokens[: i + 1]).decode(errors="replace") for i in range(len(tokens))), ""]


@stream.mutant(
    "the whole text comes at the end",
    "that is decoding, not streaming: each character is shown as soon as it is complete.",
)
def all_at_the_end(tokens):
    return [*("" for _ in tokens), b"".join(tokens).decode(errors="replace")]


@stream.mutant(
    "bytes were decoded as Latin-1",
    "one character for each byte is what looks like mojibake. Text is UTF-8: a character has 1 to 4 bytes.",
)
def as_latin_1(tokens):
    return [*(token.decode("latin-1") for token in tokens), ""]


@stream.mutant(
    "a list of everything shown so far was returned",
    "one item for each token, only what is new with it; joined, the items are the text.",
)
def so_far(tokens):
    shown = stream_reference(tokens)
    return ["".join(shown[: i + 1]) for i in range(len(shown))]


@stream.mutant(
    "each byte of a cut character at the end became its own U+FFFD",
    "the bytes of one cut character give one U+FFFD, as decoding the whole gives.",
)
def one_sign_a_byte(tokens):
    shown = stream_reference(tokens)
    waiting = 0
    for size in (1, 2, 3):
        tail = b"".join(tokens)[-size:]
        if shown[-1] and tail and tail[0] >= 0xC0:
            waiting = len(tail)
    return [*shown[:-1], "\ufffd" * waiting]


@stream.mutant(
    "each token was decoded alone, and half a character stops it",
    "a token may end inside a character. Keep the bytes until the rest has come, as an incremental decoder does.",
)
def alone_and_strict(tokens):
    return [*(token.decode() for token in tokens), ""]


@stream.mutant(
    "bytes that can never become a character stop it with an error",
    'a model can write any byte. errors="replace" shows U+FFFD for what is no character, and goes on.',
)
def strict(tokens):
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [*(decoder.decode(token) for token in tokens), decoder.decode(b"", final=True)]


EXERCISES = [count, merge, by_rank, spell, stream]
