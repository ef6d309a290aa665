"""Where tensors live. The only module that names devices."""

import os

import torch

DEVICES = ("auto", "cpu", "cuda", "mps")


def pick_device() -> torch.device:
    """The device named by the environment variable MINIMIND_DEVICE: auto (default), cpu, cuda or mps.

    `auto` takes cuda if there is one, else cpu: MPS is used only when asked for by name.
    Raises ValueError for another name and RuntimeError for a device that this machine lacks.
    """
    name = os.environ.get("MINIMIND_DEVICE", "auto").lower()
    if name not in DEVICES:
        raise ValueError(f"MINIMIND_DEVICE is {name!r}; choose one of {', '.join(DEVICES)}")
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if (name == "cuda" and not has_cuda) or (name == "mps" and not has_mps):
        raise RuntimeError(f"MINIMIND_DEVICE={name}, but PyTorch {torch.__version__} sees no {name} device; use auto")
    if name == "auto":
        name = "cuda" if has_cuda else "cpu"
    return torch.device(name)


def random_tensor(
    *shape: int,
    seed: int = 0,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A normal random tensor that is the same on every device: drawn by a CPU generator, then moved.

    shape: the sizes; scale: the standard deviation; device: `pick_device()` unless given.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = torch.randn(*shape, generator=generator, device="cpu") * scale
    return values.to(device=pick_device() if device is None else device, dtype=dtype)
