"""The options of the command line: what they are called, their defaults, and the config and settings they make."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..config import MiniMindConfig
from ..pretrained_config import load_config, read_json
from ..tokenizer import ByteTokenizer
from .settings import DTYPES, TrainingSettings

SETTINGS = [field.name for field in dataclasses.fields(TrainingSettings)]
MODEL = {  # the options that shape the model, with their defaults: a few minutes on a laptop
    "hidden_size": 128,
    "intermediate_size": None,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "dropout": 0.0,
}
RUN = {
    "start": None,
    "data": [],
    "tokenizer": None,
    "length": 256,
    "packed": True,
    "held_out": 0.05,
    "save_every": 100,
    "deterministic": False,
}
DEFAULTS = {**MODEL, **RUN, **TrainingSettings().to_dict(), "evaluate_every": 100}
ABOUT = """Train a MiniMind, from its first random weights or, with --from, from weights that have learned.

  python -m minimind_core.training --data books.txt --tokenizer train:6400 --out runs/one
  python -m minimind_core.training --data chats.jsonl --no-packed --from runs/one --out runs/chat

A .txt file holds texts between blank lines, a .jsonl file a line {"text": "..."} for each, or
{"conversations": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, of which the answers
are learned; chats need a tokenizer, not bytes.
OUT gets checkpoint.pt (to go on with --resume, bit for bit), log.jsonl (a line per update), and at the end the model
as transformers reads it: config.json, model.safetensors, and tokenizer.json unless the tokens are bytes. In Python:
minimind_core.pretrained.from_pretrained(OUT). To train it longer, or at another rate: --from OUT, and a new OUT.
Ctrl-C or SIGTERM: the micro-batch is finished, the run saved, and you are told how to go on.
The device is MINIMIND_DEVICE: auto, cpu, cuda or mps. Several processes: torchrun --nproc_per_node=2 -m
minimind_core.training ...; each takes its share of the micro-batches, and --accumulation is per process."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minimind_core.training",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )

    def add(group, name: str, help: str, dest: str | None = None, **how) -> None:
        dest = dest or name.strip("-").replace("-", "_")
        default = DEFAULTS.get(dest)
        how |= {"metavar": {int: "N", float: "X"}.get(how.get("type"), how.get("metavar"))} if "type" in how else {}
        shown = "" if default is None or default == [] or isinstance(default, bool) else f" (default: {default})"
        group.add_argument(name, dest=dest, help=help + shown, **how)

    run = parser.add_argument_group("the run")
    run.add_argument("--out", required=True, metavar="FOLDER", help="where the results go")
    run.add_argument("--resume", action="store_true", default=False, help="go on with the run in OUT, as it was begun")
    add(run, "--save-every", "updates between two checkpoints; 0: only at the end", type=int)
    add(run, "--evaluate-every", "updates between two looks at the held-out text; 0: only at the end", type=int)
    add(run, "--seed", "of the first weights, the order and dropout", type=int)
    add(run, "--deterministic", "on a GPU: slower algorithms, so that --resume is bit for bit", action="store_true")

    data = parser.add_argument_group("data")
    add(data, "--data", ".txt or .jsonl files (default: Python's own help pages)", nargs="+", metavar="FILE")
    tokenizer = (
        "bytes, a path of a tokenizer.json, or train:6400 for a new one of that size (default: --from's, else bytes)"
    )
    add(data, "--tokenizer", tokenizer, metavar="T")
    add(data, "--length", "tokens of a sample", type=int)
    packed = "texts as one stream, cut into samples without padding; chats need --no-packed (default: --packed)"
    add(data, "--packed", packed, action=argparse.BooleanOptionalAction)
    add(data, "--held-out", "share of the samples that is not trained on; 0: none", type=float)

    model = parser.add_argument_group("model")
    start = "begin with the weights, config.json and tokenizer.json of a folder, such as an earlier OUT; or with a file"
    add(model, "--from", start, "start", metavar="PATH")
    add(model, "--config", "a JSON file with MiniMindConfig's fields, or a config.json; options win", metavar="FILE")
    add(model, "--hidden-size", "width of the residual stream", type=int)
    add(model, "--intermediate-size", "width inside a feed-forward (default: about pi times the hidden size)", type=int)
    add(model, "--layers", "blocks", "num_hidden_layers", type=int)
    add(model, "--heads", "query heads", "num_attention_heads", type=int)
    add(model, "--kv-heads", "key and value heads", "num_key_value_heads", type=int)
    add(model, "--experts", "experts of a mixture; 0: dense", "num_experts", type=int)
    add(model, "--experts-per-token", "how many of them a token visits", "num_experts_per_tok", type=int)
    add(model, "--dropout", "probability", type=float)

    training = parser.add_argument_group("training")
    length = training.add_mutually_exclusive_group()
    add(length, "--steps", "updates (default: as many as the epochs need)", type=int)
    add(length, "--epochs", "times through the samples", type=float)
    add(training, "--batch-size", "samples in a micro-batch", type=int)
    add(training, "--accumulation", "micro-batches in an update", type=int)
    add(training, "--learning-rate", "the highest; a cosine leads to a tenth of it", type=float)
    add(training, "--warm-up", "updates until it is reached", type=int)
    add(training, "--weight-decay", "of matrices", type=float)
    add(training, "--clip", "longest gradient; 0: any", type=float)
    add(training, "--dtype", "of matrix products", choices=list(DTYPES))
    return parser


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line says. given: by name, only what was said; [name] adds the defaults."""

    out: Path
    resume: bool
    given: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, DEFAULTS[name])

    def settings(self) -> TrainingSettings:
        """The options that are TrainingSettings'."""
        values = {name: self[name] for name in SETTINGS}
        return TrainingSettings(**{**values, "clip": values["clip"] or None})

    def config(self, tokenizer: Any, start: MiniMindConfig | None = None) -> MiniMindConfig:
        """The model's config: `start`, else --config's, else the defaults; options win; the tokenizer's vocabulary.

        start: the config of the weights that --from names.
        """
        ends = {f"{end}_token_id": getattr(tokenizer, f"{end}_token_id") for end in ("bos", "eos", "pad")}
        ends = {name: token for name, token in ends.items() if token is not None}
        fields = {name: value for name, value in self.given.items() if name in MODEL}
        source = self["start"] or self.given.get("config")
        if start:
            self._check_shape(start)
            if isinstance(tokenizer, ByteTokenizer) and start.vocab_size > tokenizer.vocab_size:
                raise ValueError(
                    f"{source} has vocab_size {start.vocab_size}, bytes are {tokenizer.vocab_size}; give the "
                    f"tokenizer.json of these weights to --tokenizer"
                )
            config = start
        elif source:
            config = read_config(Path(source))
        else:
            config, fields = MiniMindConfig(vocab_size=tokenizer.vocab_size, **ends), {**MODEL, **fields}
        if config.vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"{source} has vocab_size {config.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens; "
                f"raise vocab_size or take another tokenizer"
            )
        experts = fields.pop("num_experts", None)
        if experts is not None and experts < 0:
            raise ValueError(f"--experts is {experts}; give 0 for a dense model, or the number of experts")
        if experts:
            fields |= {"use_moe": True, "num_experts": experts}
        elif experts == 0:
            fields["use_moe"] = False
        if experts or start:  # a router that learns, also when each token visits one expert
            fields["router_gradient"] = "straight_through"  # the outputs are the same
        return config.replace(**ends, **fields)

    def _check_shape(self, start: MiniMindConfig) -> None:
        found = {name: getattr(start, name) for name in MODEL} | {"num_experts": start.num_experts * start.use_moe}
        if start.use_moe:
            found["intermediate_size"] = start.moe_intermediate_size
        given = {name: value for name, value in self.given.items() if name in MODEL and name != "dropout"}
        if wrong := [f"{name} {found[name]}, not {given[name]}" for name in given if given[name] != found[name]]:
            raise ValueError(f"the weights of --from have {'; '.join(wrong)}; leave these options out")


def parse(arguments: list[str] | None = None) -> Options:
    """Read the command line. Exits with code 2 and the usage if it cannot be read."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    if not given["out"]:
        parser.error("--out is empty; name a folder")
    for name in ("config", "start", "tokenizer"):
        if name in given and given[name] != "bytes" and not given[name].startswith("train:"):
            given[name] = str(Path(given[name]).resolve())
    if "data" in given:
        given["data"] = [str(Path(file).resolve()) for file in given["data"]]
    return Options(Path(given.pop("out")), given.pop("resume"), given)


def read_config(file: Path) -> MiniMindConfig:
    """The config of a config.json, or of a JSON file with MiniMindConfig's fields."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is no file; give a JSON file to --config")
    fields = read_json(file)
    if "model_type" in fields:
        return load_config(file)
    try:
        return MiniMindConfig(**fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
