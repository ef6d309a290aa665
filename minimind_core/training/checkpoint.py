"""A run on disk: written so that no kill can damage it, read as tensors and plain values only."""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..files import write_atomically
from . import processes

if TYPE_CHECKING:
    from .trainer import Trainer

FORMAT = 1
COUNTERS = ("step", "micro", "tokens", "seconds", "skipped", "overflows")  # of a Trainer
FREE = ("evaluate_every", "epochs", "accumulation")  # settings that may change; the last two say what others say too


def save(trainer: "Trainer", path: str | Path) -> None:
    """Write a checkpoint: process 0 does, for all. On any error, the one before is still there."""
    gradients = None
    if trainer.micro:  # in the middle of a group, and each process has gathered its own
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
        gradients = {name: grad.to(torch.Generator().device) for name, grad in gradients.items()}
    partial = processes.gather({"gradients": gradients, "sums": trainer.sums.tolist()})
    if processes.rank() == 0:
        state = {
            "format": FORMAT,
            "identity": identity(trainer),
            "settings": trainer.settings.to_dict(),
            "counters": {name: getattr(trainer, name) for name in COUNTERS},
            "weights": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scaler": trainer.scaler.state_dict(),
            "partial": partial,
        }
        try:
            write_atomically(path, lambda file: torch.save(state, file))
        except RuntimeError as error:  # PyTorch's own, of a disk that is full
            raise OSError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    processes.wait()


def restore(trainer: "Trainer", state: dict[str, Any], path: str | Path) -> None:
    """Put a new Trainer where the saved one was. Raises ValueError, naming both values, if it is of another run."""
    lines = differences(state["identity"], identity(trainer))
    partial, mine = state["partial"], processes.rank()
    if state["counters"]["micro"] and len(partial) != processes.count():
        lines.append(f"the processes, amid an update, are {len(partial)} there, {processes.count()} here")
    if lines:
        raise ValueError(f"{path} belongs to another run; make these equal, or start anew:\n  " + "\n  ".join(lines))
    trainer.model.load_state_dict(state["weights"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scaler.load_state_dict(state["scaler"])
    for name, value in state["counters"].items():
        setattr(trainer, name, value)
    if trainer.micro:
        for name, parameter in trainer.model.named_parameters():
            gradient = partial[mine]["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        trainer.sums.copy_(torch.tensor(partial[mine]["sums"], device=trainer.device))


def identity(trainer: "Trainer") -> dict[str, Any]:
    """What must be equal for a run to go on: settings, model, data."""
    settings = {name: value for name, value in trainer.settings.to_dict().items() if name not in FREE}
    settings.update({"steps": trainer.steps, "accumulation times processes": trainer.batches.size})
    config = getattr(trainer.model, "config", None)
    return {
        "settings": settings,
        "model": config.to_dict() if config else {},
        "data": trainer.batches.fingerprint,
    }


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint, on the CPU. No code in it is run (weights_only).

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; give the checkpoint that a run has saved")
    try:
        with zipfile.ZipFile(path) as parts:  # PyTorch compares no check sums
            damaged = parts.testzip()
        if damaged is not None:
            raise ValueError(f"the check sum of {damaged} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)  # device: each part moves to its own later
    except (PermissionError, MemoryError):
        raise
    except Exception as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: it is cut short, damaged or no checkpoint ({reason})"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"{path} is no checkpoint of format {FORMAT} (found: {found}); train anew")
    return state


def differences(there: dict[str, Any], here: dict[str, Any], name: str = "") -> list[str]:
    """One line for each value that differs, with both; dictionaries inside are compared name by name."""
    lines = []
    for key in [*there, *(key for key in here if key not in there)]:
        a, b = there.get(key, "nothing"), here.get(key, "nothing")
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{name}{key}: ")
        elif a != b:
            lines.append(f"{name}{key} is {a!r} there, {b!r} here")
    return lines
