"""Text to ids and back, to use: byte-level BPE with the `tokenizers` library. How it works is in `minimind_core.bpe`.

The file format is that of MiniMind's tokenizer.json: 36 reserved tokens, 256 bytes and 6108 merges make 6400.
`Tokenizer` needs the library: pip install "minimind-core[tokenizer]". `ByteTokenizer` needs nothing.
"""

import codecs
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .bpe import Pair, bytes_to_unicode, several
from .files import write_text

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
START, END = "<|im_start|>", "<|im_end|>"
ENDS = {"bos_token": START, "eos_token": END, "pad_token": "<|endoftext|>"}
CHAT_TEMPLATE = (
    "{% for turn in messages %}" + START + "{{ turn.role }}\n{{ turn.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)


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
        return [self.encode(text) for text in several(texts)]


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
        trained.train_from_iterator(several(texts), trainer=trainer)
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

        Each goes to a temporary file first, which is then renamed. transformers' AutoTokenizer reads the folder; its
        apply_chat_template writes what `minimind_core.data.encode_chat` does.
        """
        path = Path(path)
        content = self._library.to_str(pretty=True)
        if path.suffix == ".json":
            write_text(path, content + "\n")
            return
        ends = {name: token for name, token in self._ends.items() if token is not None}
        write_text(path / TOKENIZER_FILE, content + "\n")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ends
        if {START, END} <= self.special_tokens.keys():
            settings["chat_template"] = CHAT_TEMPLATE
        write_text(path / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Text to ids; nothing is added at its ends.

        special=False: for text from a user. A special token's name in it, such as "<|im_end|>", is plain text. Tags
        that the file does not flag as special, such as "<think>", are tokens all the same.
        Raises TypeError for what is no string, UnicodeEncodeError for half a surrogate pair.
        """
        return self.encode_batch([text], special)[0]

    def encode_batch(self, texts: Iterable[str], special: bool = True) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        texts = list(several(texts))
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
        """The merges, earliest first, in the ids of `minimind_core.bpe`: bpe.encode(text, tokenizer.merges).

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
