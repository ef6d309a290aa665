"""The processes that train one model together: one, unless torchrun started more."""

import inspect
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def count() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number; process 0 writes files and speaks."""
    return dist.get_rank() if count() > 1 else 0


def join(device: torch.device) -> None:
    """Meet the other processes that torchrun started, if it did. On an accelerator, each takes one of its own.

    Numbers on the CPU travel by gloo, gradients on an NVIDIA GPU by nccl: PyTorch's default.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()


def leave() -> None:
    """The end of what `join` began."""
    if count() > 1:
        dist.destroy_process_group()


def parallel(model: nn.Module) -> nn.Module:
    """The model, sharing gradients if there are several processes. Its rotary tables are equal everywhere: not sent."""
    if count() == 1:
        return model
    options = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"  # its older name
    return DistributedDataParallel(model, **{name: False})


def add(*numbers: float) -> list[float]:
    """The sum of each number over all processes."""
    return _reduce(numbers, "SUM")


def largest(number: int) -> int:
    """The largest of all processes' numbers."""
    return int(_reduce((number,), "MAX")[0])


def _reduce(numbers: tuple[float, ...], operation: str) -> list[float]:
    if count() == 1:
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64, device=torch.Generator().device)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    return tensor.tolist()


def gather(thing: Any) -> list[Any]:
    """All processes' things, by rank, on process 0; on the others a list of None."""
    if count() == 1:
        return [thing]
    things = [None] * count()
    dist.gather_object(thing, things if rank() == 0 else None)
    return things


def wait() -> None:
    """Until every process is here."""
    largest(0)
