"""Training data: a reader's own file, or Python's help pages, as samples of equal length with their labels.

Nothing is left out in silence: a `Report` counts it, with its reason and its lines.
"""

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from .loss import IGNORED
from .tokenizer import END, START, ByteTokenizer, Tokenizer

Turns = list[dict[str, Any]]
"""A conversation: [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]"""

ROLES = ("system", "user", "assistant")
AT_ONCE = 256  # texts that are encoded together
SHOWN = 5  # places that a report names for each reason


@dataclass
class Report:
    """What became of each item. Lines of a file count from 1, the items of a list from 0.

    used: items in use; left_out: reason -> places; changed: what was done to used items -> places; tokens_cut: tokens
    beyond the length of their sample; tail: tokens at the end of a packed stream that fill no window.
    """

    source: str
    unit: str = "line"
    kind: str = "items"
    used: int = 0
    left_out: dict[str, list[int]] = field(default_factory=dict)
    changed: dict[str, list[int]] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    tokens_cut: int = 0
    tail: int = 0

    def leave_out(self, reason: str, place: int, example: str = "") -> None:
        """Count one item that is not used. example: what was found there; the first of each reason is kept."""
        self.left_out.setdefault(reason, []).append(place)
        self.examples.setdefault(reason, example)

    def change(self, what: str, place: int) -> None:
        """Count one item that is used, but not as it was."""
        self.changed.setdefault(what, []).append(place)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.used} {self.kind} used, {sum(map(len, self.left_out.values()))} left out"]
        lines += [f"  left out, {self._places(reason, places)}" for reason, places in self.left_out.items()]
        lines += [f"  used, {self._places(what, places)}" for what, places in self.changed.items()]
        more = "a larger length" + " or packed=True" * (self.kind == "texts")
        lines += [f"  {self.tokens_cut} tokens cut off; {more} keeps them"] * bool(self.tokens_cut)
        lines += [f"  the last {self.tail} tokens of the stream fill no window"] * bool(self.tail)
        return "\n".join(lines)

    def _places(self, reason: str, places: list[int]) -> str:
        named = ", ".join(map(str, places[:SHOWN]))
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        example = f"; first: {self.examples[reason]}" if self.examples.get(reason) else ""
        return f"{reason}: {len(places)} ({self.unit}{'s' * (len(places) > 1)} {named}{more}{example})"


class _Unusable(ValueError):
    """An item that cannot be used: its reason, and what was found instead."""

    def __init__(self, reason: str, example: str = "") -> None:
        super().__init__(f"{reason} ({example})" if example else reason)
        self.reason, self.example = reason, example


def python_help(repeats: bool = True) -> list[str]:
    """Python's own help pages (`pydoc_data.topics`), one text each: about 465 kB that every reader has.

    repeats=False: each paragraph once, a fifth less. Else what is held out may well have been trained on.
    """
    import pydoc_data.topics

    texts = list(pydoc_data.topics.topics.values())
    if repeats:
        return texts
    seen, distinct = set(), []
    for text in texts:
        new = [part for part in text.split("\n\n") if not (part in seen or seen.add(part))]
        distinct.append("\n\n".join(new))
    return [text for text in distinct if text.strip()]


def read_file(path: str | Path) -> tuple[list[str] | list[Turns], Report]:
    """The texts or the conversations of a file in UTF-8, and the report of what was left out.

    .txt: blank lines separate the texts. .jsonl: each line an object, {"text": "..."} or {"conversations": [{"role":
    "user", "content": "..."}, ...]}; the first usable line decides which, the report's `kind` names it ("texts" or
    "conversations"). A byte order mark and CRLF are taken off; blank lines are no items.
    Raises FileNotFoundError, and ValueError for other endings, UTF-16, and a file with nothing usable: it says why.
    """
    report = Report(Path(path).name)
    items = [item for _, item in _items(Path(path), report)]
    report.used = len(items)
    return items, report


def encode_chat(
    turns: Turns, tokenizer: Tokenizer, add_generation_prompt: bool = False
) -> tuple[list[int], list[bool]]:
    """One conversation as MiniMind's template writes it: <|im_start|>role, newline, content, <|im_end|>, newline.

    Returns ids, and for each whether it is to be learned: an answer's tokens from the first on, and its <|im_end|>;
    not the markers, and not the newline behind <|im_end|>, where generation has already stopped. (MiniMind's own
    scripts label that newline too.) Encoded turn by turn, as in generation: so an answer that begins with a space
    keeps its first token, and a marker that a turn's text contains stays text. No system turn is made up.
    add_generation_prompt: end with <|im_start|>assistant, newline, for the model to go on.
    """
    if missing := [marker for marker in (START, END) if marker not in tokenizer.special_tokens]:
        raise ValueError(
            f"the tokenizer has no {' and no '.join(missing)}; conversations need minimind_core.tokenizer.Tokenizer, "
            f"on the command line --tokenizer train:6400 or a tokenizer.json"
        )
    _check_turns(turns)
    start, end = tokenizer.special_tokens[START], tokenizer.special_tokens[END]
    ids, learned = [], []
    parts = chain.from_iterable((turn["role"] + "\n", turn["content"]) for turn in turns)
    newline, *parts = tokenizer.encode_batch(["\n", *parts, "assistant\n"], special=False)
    for turn, header, content in zip(turns, parts[::2], parts[1::2], strict=False):
        answer = turn["role"] == "assistant"
        ids += [start, *header, *content, end, *newline]
        learned += [False] * (1 + len(header)) + [answer] * (len(content) + 1) + [False] * len(newline)
    if add_generation_prompt:
        ids += [start, *parts[-1]]
        learned += [False] * (1 + len(parts[-1]))
    return ids, learned


class Samples(torch.utils.data.Dataset):
    """Samples of equal length: samples[i] is (ids, labels), both int64 [length].

    labels are the ids themselves, not shifted (the model's loss does that), and -100 where nothing is to be learned.
    Padding stands on the right; it is told by its place, so its id may be that of a real token. Kept in memory: 5
    bytes a token, without the padding. `report` says what was left out.
    """

    def __init__(
        self, tokens: torch.Tensor, learned: torch.Tensor, offsets: torch.Tensor, length: int, pad: int, report: Report
    ) -> None:
        """tokens: int32 [tokens]; learned: bool [tokens]; offsets: int64 [samples + 1], where each sample begins."""
        self.tokens, self.learned, self.offsets = tokens, learned, offsets
        self.length, self.pad_token_id, self.report = length, pad, report

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = range(len(self))[index]
        start, end = self.offsets[index : index + 2].tolist()
        ids = torch.full((self.length,), self.pad_token_id)
        labels = torch.full((self.length,), IGNORED)
        ids[: end - start] = self.tokens[start:end]
        labels[: end - start] = self.tokens[start:end].long().where(self.learned[start:end], IGNORED)
        return ids, labels

    @property
    def predictions(self) -> int:
        """How many tokens the loss counts in all samples: the labeled ones but the first of each sample."""
        return int(self.learned.sum() - self.learned[self.offsets[:-1]].sum())

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], tokenizer: Tokenizer | ByteTokenizer, length: int, packed: bool = False
    ) -> "Samples":
        """Pretraining samples: bos + text + eos, each token labeled (without bos and eos if the tokenizer has none).

        A sample is cut at `length`; then its eos is gone, since the text does not end there (MiniMind keeps an eos).
        packed: all of it as one stream, cut into windows of `length` without padding; only the tail that fills no
        window is left out. The first token of a window is not predicted, and a token sees the texts before its own.
        A special token's name in a text is that token, as in MiniMind's files.
        Raises ValueError for a length below 2, and if no sample is left.
        """
        if isinstance(texts, str):
            raise TypeError("texts is one string; give a list of them: [text]")
        report = Report("the list", "text", "texts")
        return cls._from_texts(_checked(texts, _text, report), tokenizer, length, packed, report)

    @classmethod
    def from_conversations(cls, conversations: Iterable[Turns], tokenizer: Tokenizer, length: int) -> "Samples":
        """Chat samples: a conversation each, cut at `length`, answers labeled: see `encode_chat`.

        Without a labeled token within `length`, it is left out. Raises ValueError as `from_texts` does.
        """
        report = Report("the list", "conversation", "conversations")
        return cls._from_conversations(_checked(conversations, _conversation, report), tokenizer, length, report)

    @classmethod
    def from_file(
        cls, path: str | Path, tokenizer: Tokenizer | ByteTokenizer, length: int, packed: bool = False
    ) -> "Samples":
        """Samples of a .txt or .jsonl file (see `read_file`), read piece by piece: only its tokens stay in memory."""
        report = Report(Path(path).name)
        items = _items(Path(path), report)
        items = chain([next(items)], items)
        if report.kind == "texts":
            return cls._from_texts(items, tokenizer, length, packed, report)
        if packed:
            raise ValueError(f"{path} holds conversations, which are not packed; use packed=False")
        return cls._from_conversations(items, tokenizer, length, report)

    @classmethod
    def _from_texts(
        cls, items: Iterator[tuple[int, str]], tokenizer: Any, length: int, packed: bool, report: Report
    ) -> "Samples":
        _check_length(length)
        bos, eos = ([] if end is None else [end] for end in (tokenizer.bos_token_id, tokenizer.eos_token_id))
        tokens, offsets = array("i"), array("q", [0])
        while batch := list(islice(items, AT_ONCE)):
            encoded = tokenizer.encode_batch([text for _, text in batch])
            for (place, _), ids in zip(batch, encoded, strict=True):
                ids = [*bos, *ids, *eos]
                if len(ids) < 2 and not packed:
                    report.leave_out("fewer than two tokens, so nothing to predict", place)
                    continue
                report.used += 1
                if len(ids) > length and not packed:
                    report.change(f"cut to {length} tokens", place)
                    report.tokens_cut += len(ids) - length
                    ids = ids[:length]
                tokens.extend(ids)
                offsets.append(len(tokens))
        if packed:
            report.tail = len(tokens) % length
            del tokens[len(tokens) - report.tail :]
            offsets = array("q", range(0, len(tokens) + 1, length))
            if len(offsets) < 2:
                raise ValueError(f"{report.tail} tokens fill no window of {length}; use packed=False\n{report}")
        return cls._of(tokens, bytearray(b"\x01") * len(tokens), offsets, length, tokenizer, report)

    @classmethod
    def _from_conversations(
        cls, items: Iterator[tuple[int, Turns]], tokenizer: Any, length: int, report: Report
    ) -> "Samples":
        _check_length(length)
        tokens, flags, offsets = array("i"), bytearray(), array("q", [0])
        for place, turns in items:
            ids, learned = encode_chat(turns, tokenizer)
            if not any(learned[:length]):
                report.leave_out(f"no token of an answer within {length} tokens", place)
                continue
            report.used += 1
            if any(turn.get("reasoning_content") for turn in turns):
                report.change("reasoning_content left out", place)
            if len(ids) > length:
                report.change(f"cut to {length} tokens", place)
                report.tokens_cut += len(ids) - length
            tokens.extend(ids[:length])
            flags.extend(learned[:length])
            offsets.append(len(tokens))
        return cls._of(tokens, flags, offsets, length, tokenizer, report)

    @classmethod
    def _of(
        cls, tokens: array, flags: bytearray, offsets: array, length: int, tokenizer: Any, report: Report
    ) -> "Samples":
        if len(offsets) < 2:
            raise ValueError(f"nothing usable is left\n{report}")
        kinds = ((tokens, torch.int32), (flags, torch.bool), (offsets, torch.int64))
        tensors = [torch.frombuffer(values, dtype=dtype) for values, dtype in kinds]  # no copy
        return cls(*tensors, length, tokenizer.pad_token_id or 0, report)


def _check_length(length: int) -> None:
    if length < 2:
        raise ValueError(f"length {length} leaves nothing to predict; a sample needs at least 2 tokens")


def _items(path: Path, report: Report) -> Iterator[tuple[int, Any]]:
    """(line, text or conversation) of a file. Raises ValueError if there is none."""
    readers = {".txt": _paragraphs, ".jsonl": _records}
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give {' and '.join(readers)} files")
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'!r}; read are {' and '.join(readers)}")
    found = False
    for item in readers[path.suffix.lower()](path, report):
        found = True
        yield item
    if not found:
        raise ValueError(f"nothing usable in {path} ({os.path.getsize(path)} bytes)\n{report}")


def _lines(path: Path, report: Report) -> Iterator[tuple[int, str]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ValueError(f"{path} is UTF-16; save it as UTF-8")
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                report.leave_out("not UTF-8", number, f"byte 0x{error.object[error.start]:02x}")


def _paragraphs(path: Path, report: Report) -> Iterator[tuple[int, str]]:
    report.kind = "texts"
    paragraph, first = [], 0
    for number, line in chain(_lines(path, report), [(0, "")]):
        if line.strip():
            first = first if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield first, "\n".join(paragraph)
            paragraph = []


def _records(path: Path, report: Report) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path, report):
        if not line.strip():
            continue
        try:
            kind, item = _record(line)
            if report.kind not in ("items", kind):
                raise _Unusable(f"{kind} in a file of {report.kind}")
        except _Unusable as error:
            report.leave_out(error.reason, number, error.example)
            continue
        report.kind = kind
        yield number, item


def _record(line: str) -> tuple[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _Unusable("not valid JSON", str(error)) from error
    if not isinstance(record, dict):
        raise _Unusable("not a JSON object", type(record).__name__)
    if "conversations" in record:
        return "conversations", _conversation(record["conversations"])
    if "text" in record:
        return "texts", _text(record["text"])
    raise _Unusable('neither "text" nor "conversations"', f"keys {', '.join(list(record)[:5]) or 'none'}")


def _checked(values: Iterable[Any], check: Any, report: Report) -> Iterator[tuple[int, Any]]:
    for place, value in enumerate(values):
        try:
            yield place, check(value)
        except _Unusable as error:
            report.leave_out(error.reason, place, error.example)


def _text(value: Any, name: str = "text", empty: bool = False) -> str:
    if not isinstance(value, str):
        raise _Unusable(f"{name} is not a string", type(value).__name__)
    if not empty and not value.strip():
        raise _Unusable(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _Unusable(f"{name} holds half a surrogate pair", f"{value[error.start]!a} at {error.start}") from error
    return value


def _conversation(turns: Any) -> Turns:
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _Unusable("conversations is not a list of objects", type(turns).__name__)
    _check_turns(turns)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise _Unusable("no turn of the assistant", f"{len(turns)} turns")
    return turns


def _check_turns(turns: Turns) -> None:
    for turn in turns:
        role = turn.get("role")
        if role not in ROLES:
            raise _Unusable(f"a role other than {', '.join(ROLES)}", f"{role!r}")
        if turn.get("tools") or turn.get("tool_calls"):
            raise _Unusable("tools, which are not taught here")
        _text(turn.get("content"), f"content of {role}", empty=role != "assistant")
