"""Which function of MiniMind's source each notebook teaches, and which notebooks to read again after it changed.

    python -m minimind_core.upstream                    the record: notebook, file, function, commit
    python -m minimind_core.upstream PATH_OF_CLONE      compares a clone of MiniMind with the record

The notebooks follow MiniMind's commit d65ef2c. The record keeps no source, only names and fingerprints. An entry's
`commit` is that of the text which was hashed. It is not d65ef2c, whose own text was not at hand, but a clone at d65ef2c
should compare as all the same. MiniMind-2's source, which some notebooks set beside it, is not in the record.

To follow a newer commit: mend the notebooks, then put that commit and `fingerprint(text of the file, function)` into
TAUGHT.
"""

import argparse
import ast
import hashlib
import io
import re
import sys
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

NOTEBOOKS = (
    "00_start_here",
    "01_rmsnorm",
    "02_rope",
    "03_yarn",
    "04_attention_gqa",
    "05_kv_cache",
    "06_swiglu",
    "07_residual_block",
    "08_moe_gate",
    "09_moe_dispatch",
    "10_tied_embeddings",
    "11_shifted_cross_entropy",
    "12_the_whole_model",
    "13_tokenizer",
    "14_training",
    "15_generation",
)

TAUGHT = {  # (file, commit): {function: (fingerprint, numbers of the notebooks)}
    ("model/model_minimind.py", "0074dcf"): {
        "MiniMindConfig": ("ea05be08b085acd2", (0, 3)),
        "RMSNorm": ("532271f5ee98f5d0", (1,)),
        "precompute_freqs_cis": ("c40358ca1c985521", (2, 3)),
        "apply_rotary_pos_emb": ("c4c977e6481aff31", (2,)),
        "repeat_kv": ("bd1613c2e9bc3f3f", (4,)),
        "Attention": ("90ace8b139d41dad", (4,)),
        "Attention.forward": ("cf36ac8518e3efe5", (5,)),
        "FeedForward": ("7fafd5ca59d696e5", (6,)),
        "MOEFeedForward": ("4fcbc21de48b24eb", (8, 9)),
        "MiniMindBlock": ("8366d72051c34855", (7,)),
        "MiniMindModel": ("d76c98b70c7967b2", (0, 12)),
        "MiniMindModel.forward": ("02bcacd17c756b0f", (5,)),
        "MiniMindForCausalLM": ("5d8243796e0ceaa8", (0, 12)),
        "MiniMindForCausalLM.__init__": ("c195f0545bd64a7e", (10,)),
        "MiniMindForCausalLM.forward": ("4947174fa8119f4e", (11,)),
        "MiniMindForCausalLM.generate": ("cae1f2fbe401c6a0", (15,)),
    },
    ("trainer/train_tokenizer.py", "101d7df"): {
        "train_tokenizer": ("bf8d491afefbed8d", (13,)),
        "eval_tokenizer": ("019fb45697c34132", (13,)),
    },
    ("dataset/lm_dataset.py", "101d7df"): {
        "PretrainDataset": ("482a436128f25c9c", (14,)),
        "SFTDataset": ("f597713cdd83f1c7", (14,)),
    },
    ("trainer/trainer_utils.py", "101d7df"): {
        "get_lr": ("92d87c19d2379c31", (14,)),
        "init_distributed_mode": ("eafe0c68afd18b24", (14,)),
        "setup_seed": ("c1a50a3e7d986611", (14,)),
        "lm_checkpoint": ("d00480caa6e80378", (14,)),
        "SkipBatchSampler": ("cf1480106530ad92", (14,)),
    },
    ("trainer/train_pretrain.py", "101d7df"): {
        "train_epoch": ("32680ae61c456b8c", (14,)),
    },
}

UNTAUGHT = {  # what else these files held then; so it is not new
    "trainer/train_tokenizer.py": {"get_texts"},
    "dataset/lm_dataset.py": {
        "pre_processing_chat",
        "post_processing_chat",
        "DPODataset",
        "RLAIFDataset",
        "AgentRLDataset",
    },
    "trainer/trainer_utils.py": {"get_model_params", "is_main_process", "Logger", "init_model", "LMForRewardModel"},
}

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
DIGITS = 16  # of the SHA-256 that are kept


@dataclass(frozen=True)
class Entry:
    """One function or class of MiniMind that notebooks teach."""

    file: str  # path inside MiniMind
    function: str  # "RMSNorm", "Attention.forward"
    notebooks: tuple[str, ...]
    commit: str  # of the text that was hashed
    hash: str  # fingerprint(text of file, function)


@dataclass(frozen=True)
class Drift:
    """What `compare` found."""

    rows: list[tuple[str, Entry]]  # ("same", "changed" or "gone", entry), in the order of RECORD
    new: list[tuple[str, str]]  # (file, function) at the top level that the record does not know

    @property
    def notebooks(self) -> list[str]:
        """The notebooks to read again, in their order; empty if every recorded function is the same."""
        return sorted({name for status, entry in self.rows if status != "same" for name in entry.notebooks})


RECORD = [
    Entry(file, function, tuple(NOTEBOOKS[number] for number in numbers), commit, kept)
    for (file, commit), functions in TAUGHT.items()
    for function, (kept, numbers) in functions.items()
]


def fingerprint(source: str, name: str) -> str:
    """16 hex digits of the SHA-256 of a function's or class's tokens, decorators included.

    source: the text of a Python file. name: "function", "Class" or "Class.method".
    Comments, blank lines, white space, line breaks inside brackets and strings that stand alone as a statement (such as
    docstrings) do not count; every other token does. CRLF and LF give the same. The same on Python 3.10 to 3.14.
    Where a name is defined twice, the last one counts, as in Python. Raises LookupError if source does not define name,
    SyntaxError if it is not Python.
    """
    source = _normalize(source)
    first, last = _find(source, name)
    tokens = [(kind, text) for row, kind, text in _tokens(source) if first <= row <= last]
    while tokens[0][0] in ("INDENT", "DEDENT"):  # they belong to what stands before
        tokens.pop(0)
    return hashlib.sha256("\0".join(text for _, text in tokens).encode()).hexdigest()[:DIGITS]


def compare(path: str | Path) -> Drift:
    """Compare a clone of MiniMind in folder `path` with RECORD. Nothing in the clone is run.

    A missing file counts as: all of its functions are gone. Raises FileNotFoundError if path is not a folder or holds
    none of the files, ValueError with the file's name if one cannot be read as Python.
    """
    path = Path(path)
    files = {entry.file: path / entry.file for entry in RECORD}
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give the folder of your clone of MiniMind")
    if not any(file.is_file() for file in files.values()):
        raise FileNotFoundError(f"{path} is no clone of MiniMind: it has none of {', '.join(files)}")
    sources = {name: _read(file) for name, file in files.items() if file.is_file()}
    rows = [(_status(sources.get(entry.file, ""), entry), entry) for entry in RECORD]
    new = [
        (file, node.name)
        for file, source in sources.items()
        for node in _parse(source).body
        if isinstance(node, DEFINITIONS) and node.name not in _known(file)
    ]
    return Drift(rows, new)


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit code: 0 if every recorded function is the same (there may be new ones), else 1.

    Exits with 2 and a message for a wrong path or a file that is not Python.
    """
    parser = argparse.ArgumentParser(
        prog="python -m minimind_core.upstream",
        description="Which notebooks does a newer MiniMind ask you to read again?",
    )
    parser.add_argument("path", nargs="?", help="folder of a clone of MiniMind; without it, the record is printed")
    path = parser.parse_args(arguments).path
    if path is None:
        _print_record()
        return 0
    try:
        drift = compare(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for status, entry in drift.rows:
        print(f"{status:8} {entry.file:27} {entry.function}")
    for file, function in drift.new:
        print(f"{'new':8} {file:27} {function}")
    if not drift.notebooks:
        print(f"\nAll {len(drift.rows)} recorded functions are the same. No notebook to read again.")
        return 0
    print(f"\nRead again, with MiniMind's change beside you: {', '.join(drift.notebooks)}")
    return 1


def _print_record() -> None:
    print(f"{'notebook':25} {'file':27} {'function':29} commit")
    for notebook in NOTEBOOKS:
        for entry in RECORD:
            if notebook in entry.notebooks:
                print(f"{notebook:25} {entry.file:27} {entry.function:29} {entry.commit}")


def _status(source: str, entry: Entry) -> str:
    try:
        return "same" if fingerprint(source, entry.function) == entry.hash else "changed"
    except LookupError:
        return "gone"


def _known(file: str) -> set[str]:
    return {entry.function for entry in RECORD if entry.file == file} | UNTAUGHT.get(file, set())


def _read(file: Path) -> str:
    try:
        source = file.read_text(encoding="utf-8-sig")
        _parse(source)
    except (SyntaxError, ValueError) as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ValueError(
            f"{file} cannot be read as Python {version} ({error}); look at it, or use a newer Python"
        ) from error
    return source


def _normalize(source: str) -> str:
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():  # such as for "\d" in a string: not this reader's to mend
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _find(source: str, name: str) -> tuple[int, int]:
    """First and last line of a definition, counted from 1, decorators included."""
    body = _parse(source).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, DEFINITIONS) and node.name == part]
        if not found:
            raise LookupError(f"no function or class {name!r} in this source")
        node = found[-1]
        body = node.body
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]), node.end_lineno


def _tokens(source: str) -> list[tuple[int, str, str]]:
    """(line, kind, text) of each token that counts. Indentation and ends of statements have their kind as text.

    From Python 3.12 on an f-string comes in pieces; here it is one token again, as before.
    """
    lines = source.split("\n")
    kept, statement = [], []
    pieces = []  # where the f-strings begin that are open
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, row, text = tokenize.tok_name[token.type], token.start[0], token.string
        if kind.endswith("STRING_START"):
            pieces.append(token.start)
            continue
        if kind.endswith("STRING_END"):
            (row, column), kind = pieces.pop(), "STRING"
            text = _cut(lines, row, column, *token.end)
        if pieces or kind in ("COMMENT", "NL", "ENDMARKER"):
            continue
        if kind in ("INDENT", "DEDENT"):
            kept.append((row, kind, kind))
        elif kind != "NEWLINE":
            statement.append((row, kind, text))
        else:
            if not all(_is_plain_string(kind, text) for _, kind, text in statement):
                kept += [*statement, (row, kind, kind)]
            statement = []
    return kept


def _is_plain_string(kind: str, text: str) -> bool:
    return kind == "STRING" and not re.match("[a-z]*[ft]", text, re.IGNORECASE)


def _cut(lines: list[str], row: int, column: int, end_row: int, end_column: int) -> str:
    if row == end_row:
        return lines[row - 1][column:end_column]
    return "\n".join([lines[row - 1][column:], *lines[row : end_row - 1], lines[end_row - 1][:end_column]])


if __name__ == "__main__":
    sys.exit(main())
