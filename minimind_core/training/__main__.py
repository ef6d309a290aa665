"""python -m minimind_core.training: train from the command line, stop, go on, in one process or several."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from ..config import MiniMindConfig
from ..data import Samples, python_help, read_file
from ..device import pick_device
from ..files import write_text
from ..model import MiniMindForCausalLM, count_parameters
from ..pretrained import WEIGHTS_FILE, from_pretrained, save_pretrained
from ..pretrained_config import CONFIG_FILE, read_json, to_settings
from ..tokenizer import TOKENIZER_FILE, ByteTokenizer, Tokenizer
from . import processes
from .options import MODEL, Options, parse, read_config
from .trainer import Record, Trainer

CHECKPOINT, LOG, OPTIONS = "checkpoint.pt", "log.jsonl", "options.json"
QUIET = 10  # seconds between two lines where there is no terminal


def main(arguments: list[str] | None = None) -> int:
    """Train. Returns the exit code: 0, 1 for a run that broke, 2 for wrong values, 128 + n when signal n stopped it."""
    options = parse(arguments)
    trainer = None
    try:
        device = _device()
        processes.join(device)
        options = _open(options)
        if options["deterministic"]:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        trainer = _prepare(options, device)
        return _train(trainer, options)
    except KeyboardInterrupt:
        say("stopped before the first update; nothing to save")
        return 128 + signal.SIGINT
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        named = isinstance(error, OSError) and error.filename is not None
        print(f"error: {f'{error.filename}: {error.strerror}' if named else error}", file=sys.stderr)
        return 2 if trainer is None else 1
    finally:
        processes.leave()


def say(text: str) -> None:
    """A line for whoever watches; one process speaks for all."""
    if processes.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def _device() -> torch.device:
    try:
        return pick_device()
    except RuntimeError as error:
        raise ValueError(error) from error


def _open(options: Options) -> Options:
    """Check the folder, and write down the options in it or read them from it: to resume, --out is enough."""
    out, kept = options.out, options.out / OPTIONS
    if options.resume:
        if not (out / CHECKPOINT).is_file():
            raise FileNotFoundError(f"{out} holds no {CHECKPOINT} to go on with; leave out --resume to begin")
        given = read_json(kept)
        for name in ("start", "config", "tokenizer", *MODEL):  # the others are compared with the checkpoint's
            now, then = options.given.get(name, given.get(name)), given.get(name)
            if now != then:
                option = "--from" if name == "start" else name
                raise ValueError(
                    f"--resume goes on as the run began: {option} is {then} there, {now} here; leave it out"
                )
        if "epochs" in options.given:  # one of the two says how long; what is said now wins
            given.pop("steps", None)
        return Options(out, True, given | options.given)
    for file in (CHECKPOINT, WEIGHTS_FILE, CONFIG_FILE):
        if (out / file).exists():
            raise FileExistsError(f"{out} already holds {file}; go on with --resume, or choose another --out")
    if (out / TOKENIZER_FILE).exists() and not kept.exists() and not str(options["tokenizer"]).startswith("train:"):
        raise FileExistsError(f"{out} already holds a {TOKENIZER_FILE}; choose another --out")
    processes.wait()  # until all have looked
    return options


def _prepare(options: Options, device: torch.device) -> Trainer:
    settings, out = options.settings(), options.out
    if not 0 <= options["held_out"] <= 0.5:
        raise ValueError(f"--held-out is {options['held_out']}; give a share of at least 0 and at most 0.5")
    if options["save_every"] < 0:
        raise ValueError(f"--save-every is {options['save_every']}; give a number of updates, or 0 for the end only")
    tokenizer = _tokenizer(options)
    config = None if options.resume else options.config(tokenizer, _start_config(options))
    samples, held_out = _samples(options, tokenizer)
    if options.resume:
        trainer = Trainer.resume(out / CHECKPOINT, samples, held_out, device, settings=settings)
    else:
        to_settings(config, torch.float32)  # raises now what save_pretrained could not hold at the end
        torch.manual_seed(settings.seed)
        start = options["start"]
        model = from_pretrained(start, config) if start else MiniMindForCausalLM(config)
        trainer = Trainer(model, samples, settings, held_out, device)
        if processes.rank() == 0:
            if isinstance(tokenizer, Tokenizer):
                tokenizer.save(out)  # to resume, OUT is enough
            write_text(out / OPTIONS, json.dumps(options.given, indent=2) + "\n")
    parameters = count_parameters(trainer.model).total
    say(
        f"{parameters:,} parameters, {len(samples):,} samples of {options['length']} tokens and "
        f"{len(held_out or ()):,} held out; {trainer.steps:,} updates on {device}, processes: {processes.count()}"
    )
    return trainer


def _start_config(options: Options) -> MiniMindConfig | None:
    """The config of the weights that --from names."""
    if not options["start"]:
        return None
    start, config = Path(options["start"]), options.given.get("config")
    if config or (start / CONFIG_FILE).is_file():
        return read_config(Path(config or start / CONFIG_FILE))
    try:
        return from_pretrained(start).config
    except FileNotFoundError as error:
        raise FileNotFoundError(str(error).replace("config=MiniMindConfig(...)", "--config")) from error


def _tokenizer(options: Options) -> Tokenizer | ByteTokenizer:
    name, out, start = options["tokenizer"], options.out, options["start"]
    if options.resume and name != "bytes" and (out / TOKENIZER_FILE).is_file():
        return Tokenizer.load(out)
    if start and name is None and (Path(start) / TOKENIZER_FILE).is_file():
        return Tokenizer.load(start)
    if name in ("bytes", None):
        return ByteTokenizer()
    if not name.startswith("train:"):
        return Tokenizer.load(name)
    if start:
        raise ValueError(
            f"--tokenizer is {name!r}, but the weights of --from know their own tokens; give its tokenizer"
        )
    if not options.resume and processes.rank() == 0:
        size = name.removeprefix("train:")
        if not size.isdigit():
            raise ValueError(f"--tokenizer is {name!r}; say how many tokens, as in train:6400")
        Tokenizer.train(_texts(options["data"]), int(size)).save(out)
    processes.wait()
    return Tokenizer.load(out / TOKENIZER_FILE)


def _texts(files: list[str]) -> Iterator[str]:
    for file in files:
        for item in read_file(file)[0]:
            yield from [item] if isinstance(item, str) else [turn["content"] for turn in item]
    if not files:
        yield from python_help(repeats=False)


def _samples(options: Options, tokenizer: Any) -> tuple[Sequence, Sequence | None]:
    """The samples to train on, and those held out, evenly spread."""
    length, packed = options["length"], options["packed"]
    try:
        parts = [Samples.from_file(file, tokenizer, length, packed) for file in options["data"]]
        if not parts:
            parts = [Samples.from_texts(python_help(repeats=False), tokenizer, length, packed)]
            parts[0].report.source = "Python's help pages"
    except ValueError as error:
        raise ValueError(str(error).replace("packed=False", "--no-packed")) from error
    for part in parts:
        say(str(part.report))
    samples = parts[0] if len(parts) == 1 else ConcatDataset(parts)
    share = options["held_out"]
    if not share:
        return samples, None
    sides = [], []
    for i in range(len(samples)):
        sides[int((i + 1) * share) > int(i * share)].append(i)
    if not sides[1]:
        raise ValueError(
            f"--held-out {share} of {len(samples)} samples is none; give 0, a larger share, a smaller --length or "
            f"more text"
        )
    return Subset(samples, sides[0]), Subset(samples, sides[1])


def _train(trainer: Trainer, options: Options) -> int:
    def stop(number: int, frame: Any) -> None:
        trainer.stop = number

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    file, every = options.out / CHECKPOINT, options["save_every"]
    try:
        try:
            with Watch(trainer, options.out / LOG) as watch:
                for record in trainer.run():
                    watch.show(record)
                    if every and record.step % every == 0:
                        trainer.save(file)
        except FloatingPointError:
            trainer.save(file)  # as it was before this update
            say(f"saved in {file}; to go on at another rate, begin a new run")
            raise
        trainer.save(file)
        if trainer.step == trainer.steps:
            if processes.rank() == 0:
                save_pretrained(trainer.model, options.out)
            say(f"done: the model is in {options.out}")
            return 0
        start = "python" if processes.count() == 1 else f"torchrun --nproc_per_node={processes.count()}"
        say(
            f"stopped after {trainer.step} of {trainer.steps} updates and saved; go on with\n"
            f"  {start} -m minimind_core.training --out {options.out} --resume"
        )
        return 128 + trainer.stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watch:
    """The log file and the progress on stderr: a bar in a terminal, else a line now and then. Process 0's business."""

    def __init__(self, trainer: Trainer, log: Path):
        self.trainer, self.last, self.log, self.bar = trainer, -math.inf, None, None
        if processes.rank():
            return
        # after a crash the log may be ahead of the checkpoint, and its last line cut short
        lines = log.read_text(encoding="utf-8").splitlines() if trainer.step and log.is_file() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= trainer.step]
        write_text(log, "".join(line + "\n" for line in kept))
        self.log = open(log, "a", encoding="utf-8")
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=trainer.steps, initial=trainer.step, unit="update")

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_) -> None:
        for thing in (self.log, self.bar):
            if thing is not None:
                thing.close()

    def show(self, record: Record) -> None:
        """Write the record into the log and show it."""
        if self.log is None:
            return
        values = record._asdict()
        values = {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
        self.log.write(json.dumps(values) + "\n")
        self.log.flush()
        text = f"loss {record.loss:.3f}"
        if record.held_out_loss is not None:
            text += f", held out {record.held_out_loss:.3f}"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(record.step - self.bar.n)
        elif record.held_out_loss is not None or time.monotonic() - self.last >= QUIET:
            self.last = time.monotonic()
            rate = record.tokens / record.seconds
            say(f"update {record.step} of {self.trainer.steps}: {text}, {rate:,.0f} tokens/s")


if __name__ == "__main__":
    code = main()
    if "LOCAL_RANK" in os.environ:  # torchrun: at Python's own exit, a thread that lets go of a tensor late would abort
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
