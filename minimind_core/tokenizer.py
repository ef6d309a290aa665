"""Byte-level BPE (byte pair encoding): by hand, to see how it works, and with the `tokenizers` library, to use it.

The functions are the lesson: ids 0 .. 255 are the bytes, merges[i] makes token 256 + i. `Tokenizer` is the practical
path, in the file format of MiniMind's tokenizer.json: 36 reserved tokens, 256 bytes, 6108 merges make 6400.
It needs the library: pip install "minimind-core[tokenizer]". The functions and `ByteTokenizer` need nothing.
"""

import codecs
import json
import os
import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

Pair = tuple[int, int]

CONTROL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<|audio_start|> <|audio_end|> <|audio_pad|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single>"
).split()
TAGS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>".split()
SPARE_TOKENS = [f"<|buffer{i}|>" for i in range(1, 10)]
RESERVED_TOKENS = CONTROL_TOKENS + TAGS + SPARE_TOKENS
"""MiniMind's 36 reserved tokens, ids 0 .. 35. Only the first 21 are flagged special in its files."""

TOKENIZER_FILE, SETTINGS_FILE = "tokenizer.json", "tokenizer_config.json"
ENDS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}

# ---------------------------------------------------------------- by hand


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
    pieces = Counter(piece for text in _several(texts) for piece in pre_tokenize(text))
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


def _several(texts: Iterable[str]) -> Iterable[str]:
    if isinstance(texts, str):
        raise TypeError("texts is one string; give a list of them: [text]")
    return texts


# ---------------------------------------------------------------- to use


class _Bytes:
    """What both tokenizers share: a table of each token's bytes."""

    _tokens: list[bytes]
    _skipped: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def vocab_size(self) -> int:
        """The number of ids, as a model's config needs it."""
        return len(self._tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token < len(self._tokens):
            raise ValueError(
                f"id {int(token)} is outside the vocabulary 0 .. {len(self._tokens) - 1}; "
                f"decode with the tokenizer that the model was trained with"
            )
        return self._tokens[token]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Ids (a list or a 1-D tensor) to text. Bytes that are no whole character become U+FFFD.

        skip_special_tokens: leave out the tokens that the file flags as special.
        """
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        skipped = self._skipped if skip_special_tokens else ()
        return b"".join(self.token_bytes(token) for token in ids if token not in skipped).decode(errors="replace")


class ByteTokenizer(_Bytes):
    """The toy model's tokenizer: ids 0 .. 255 are the bytes of the text. No special tokens; bos, eos, pad are None."""

    def __init__(self) -> None:
        self._tokens = [bytes([byte]) for byte in range(256)]
        self.special_tokens: dict[str, int] = {}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The bytes of the text; `special` changes nothing here."""
        return list(text.encode())

    def encode_batch(self, texts: Iterable[str], special: bool = True) -> list[list[int]]:
        """`encode` for many texts."""
        return [self.encode(text) for text in _several(texts)]


class Tokenizer(_Bytes):
    """A byte-level BPE tokenizer: `Tokenizer.train(texts)`, or `Tokenizer.load(path)` of a tokenizer.json.

    bos_token_id, eos_token_id, pad_token_id: 1, 2, 0 in MiniMind's; None where the vocabulary lacks the token.
    special_tokens: text -> id of every reserved token.
    """

    def __init__(self, content: str, ends: Mapping[str, str] = ENDS, source: Any = "the text") -> None:
        """content: the text of a tokenizer.json. ends: which tokens are bos_token, eos_token, pad_token.

        Raises ValueError if it is no tokenizer or not of the byte level.
        """
        try:
            settings = json.loads(content)
            self._library = _tokenizers().Tokenizer.from_str(content)
        except ImportError:
            raise
        except Exception as error:
            raise ValueError(
                f"{source} is not a {TOKENIZER_FILE} of the tokenizers library ({error}); "
                f"it is another file, cut short, or a Git LFS pointer"
            ) from error
        model, decoder = settings["model"].get("type"), settings.get("decoder") or {}
        kinds = {part["type"] for part in (decoder, *decoder.get("decoders", ())) if "type" in part}
        if model != "BPE" or "ByteLevel" not in kinds:
            raise ValueError(
                f"{source} holds a model of type {model!r} with decoder {', '.join(sorted(kinds)) or None}; "
                f"only byte-level BPE is read here: type 'BPE' with decoder ByteLevel"
            )
        self._plain = _tokenizers().Tokenizer.from_str(content)
        self._plain.encode_special_tokens = True  # that is: as plain text
        self._ends = {name: ends.get(name) for name in ENDS}
        added = {token["id"]: token for token in settings.get("added_tokens", ())}
        self.special_tokens = {token["content"]: i for i, token in sorted(added.items())}
        self._skipped = frozenset(i for i, token in added.items() if token["special"])
        ids = self._library.get_vocab(with_added_tokens=True)
        self._tokens = [b""] * (max(ids.values(), default=-1) + 1)
        bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}
        for token, i in ids.items():
            spelled = i not in added and bytes_of.keys() >= set(token)
            self._tokens[i] = bytes(map(bytes_of.get, token)) if spelled else token.encode()
        self.bos_token_id, self.eos_token_id, self.pad_token_id = (ids.get(name) for name in self._ends.values())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int = 6400) -> "Tokenizer":
        """Learn a vocabulary: MiniMind's 36 reserved tokens, the 256 bytes, and vocab_size - 292 merges.

        Warns if the texts give fewer merges; `.vocab_size` tells. Raises ValueError for a vocab_size below 292.
        """
        smallest = len(RESERVED_TOKENS) + 256
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size {vocab_size} is below {smallest}: {len(RESERVED_TOKENS)} reserved tokens + 256 bytes"
            )
        library = _tokenizers()
        trained = library.Tokenizer(library.models.BPE())
        trained.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=RESERVED_TOKENS,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        trained.train_from_iterator(_several(texts), trainer=trainer)
        settings = json.loads(trained.to_str())
        for token in settings["added_tokens"]:
            token["special"] = token["content"] in CONTROL_TOKENS  # tags stay visible in decoded text
        tokenizer = cls(json.dumps(settings))
        if tokenizer.vocab_size < vocab_size:
            warnings.warn(
                f"the texts give {tokenizer.vocab_size - smallest} merges, so vocab_size is {tokenizer.vocab_size}, "
                f"not {vocab_size}; give more text, or build the model with tokenizer.vocab_size",
                stacklevel=2,
            )
        return tokenizer

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json, or a folder that holds one, such as MiniMind's.

        A tokenizer_config.json beside it names the bos, eos and pad tokens; else they are MiniMind's.
        Raises FileNotFoundError for what is not there, ValueError for a file that is no byte-level BPE.
        """
        file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
        if not file.is_file():
            found = sorted(entry.name for entry in file.parent.iterdir())[:8] if file.parent.is_dir() else []
            raise FileNotFoundError(f"{file} is not there; found beside it: {', '.join(found) or 'nothing'}")
        ends = ENDS
        if (beside := file.with_name(SETTINGS_FILE)).is_file() and beside != file:
            try:
                settings = json.loads(_read(beside))
                named = {name: settings.get(name) for name in ENDS}
            except (ValueError, AttributeError) as error:
                raise ValueError(
                    f"{beside} is not a JSON object with bos_token, eos_token, pad_token: {error}"
                ) from error
            ends = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
        tokenizer = cls(_read(file), ends, file)
        for name, token in ends.items():
            if ends is not ENDS and token is not None and getattr(tokenizer, f"{name}_id") is None:
                raise ValueError(f"{beside} names {name} {token!r}, which {file} lacks; they are of two tokenizers")
        return tokenizer

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into the folder `path`, or one file if `path` ends in .json.

        Each goes to a temporary file first, which is then renamed. transformers' AutoTokenizer reads the folder.
        """
        path = Path(path)
        content = self._library.to_str(pretty=True)
        if path.suffix == ".json":
            _write(path, content)
            return
        path.mkdir(parents=True, exist_ok=True)
        ends = {name: token for name, token in self._ends.items() if token is not None}
        _write(path / TOKENIZER_FILE, content)
        _write(path / SETTINGS_FILE, json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | ends, indent=2))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Text to ids; nothing is added at its ends.

        special=False: for text from a user. A special token's name in it, such as "<|im_end|>", is plain text. Tags
        that the file does not flag as special, such as "<think>", are tokens all the same.
        Raises TypeError for what is no string, UnicodeEncodeError for half a surrogate pair.
        """
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Iterable[str], special: bool = True) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        texts = list(_several(texts))
        library = self._library if special else self._plain
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"a text is a {type(text).__name__}; give strings")
        try:
            return [encoding.ids for encoding in library.encode_batch_fast(texts, add_special_tokens=False)]
        except TypeError:
            for text in texts:
                text.encode()  # raises, and says where; the library does not
            raise

    def __reduce__(self) -> tuple:
        return type(self), (self._library.to_str(), self._ends)  # the library's own pickle forgets _plain's flag

    @property
    def merges(self) -> list[Pair]:
        """The merges, earliest first, in the ids of this module's functions: encode(text, tokenizer.merges).

        Raises ValueError for a file in which two merges make the same token.
        """
        spelled = [tuple(pair) for pair in json.loads(self._library.to_str())["model"]["merges"]]
        ids = {character: byte for byte, character in bytes_to_unicode().items()}
        ids |= {left + right: 256 + i for i, (left, right) in enumerate(spelled)}
        if len(ids) < 256 + len(spelled):
            raise ValueError(f"{256 + len(spelled) - len(ids)} tokens are made by two merges; not numbered here")
        return [(ids[left], ids[right]) for left, right in spelled]


class StreamDecoder:
    """Text from ids as they come: never half a character. All that it returns, joined, is decode(ids)."""

    def __init__(self, tokenizer: _Bytes, skip_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer._skipped if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, token: int) -> str:
        """Take one id; return the characters that it completes, "" while a character still lacks bytes."""
        token = int(token)
        return "" if token in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """The end of the stream: U+FFFD for a character that was cut, else "". The decoder can then be used anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError('this needs tokenizers: pip install "minimind-core[tokenizer]"') from error
    return tokenizers


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); it is another file"
        ) from error


def _write(file: Path, content: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.unfinished")
    try:
        temporary.write_text(content + "\n", encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
