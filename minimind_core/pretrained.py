"""Weights on disk: folders as Hugging Face's transformers reads and writes them, and MiniMind's own files.

Needs safetensors: pip install "minimind-core[pretrained]". Nothing is downloaded, and no code of a folder is run.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from einops import rearrange

from .config import MiniMindConfig
from .model import MiniMindForCausalLM
from .pretrained_config import CONFIG_FILE, EMBEDDING, HEAD, config_from_shapes, load_config, read_json, to_settings

Weights = dict[str, torch.Tensor]

WEIGHTS_FILE, OLD_WEIGHTS_FILE = "model.safetensors", "pytorch_model.bin"
LISTED = 8  # names of each kind that an error lists


def save_pretrained(model: MiniMindForCausalLM, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors, so that transformers' AutoModelForCausalLM reads the folder.

    A dense model becomes a Qwen3, a mixture of experts a Qwen3-MoE, a dense model without QK-norm (MiniMind-2) a Llama.
    config.json holds MiniMindConfig's other fields too, under their own names. Not kept: a YaRN dictionary that is not
    in force, since transformers' YaRN always is. A tied matrix is written once. dtype: of the file; the model's unless
    given. In float32 transformers gives the same logits; in half precision its norms round before the weight
    (rms_norm_cast="before_weight"), so a MiniMind-3 differs there in the last bits.
    Raises ValueError, and leaves the folder's files as they are, for what these three classes cannot hold.
    """
    weights = dict(model.state_dict())
    _check_fit(weights, _planned(model.config), "the model")
    dtype = _one_dtype(weights, dtype, "the model")
    settings = to_settings(model.config, dtype)
    weights = _one_or_two_ends(weights, model.config)
    weights = {name: _cast(name, value, dtype).contiguous() for name, value in weights.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder) as name:
        unfinished = Path(name)
        (unfinished / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        library = _safetensors()
        try:
            library.torch.save_file(weights, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
        except library.SafetensorError as error:  # of a disk that is full
            raise OSError(f"{folder} cannot be written: {error}") from error
        shutil.copymode(unfinished / CONFIG_FILE, unfinished / WEIGHTS_FILE)  # safetensors lets only the owner read
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(unfinished / file, Path(folder) / file)


def from_pretrained(
    path: str | Path, config: MiniMindConfig | None = None, dtype: torch.dtype | None = torch.float32
) -> MiniMindForCausalLM:
    """The model of a folder or of a file, on the CPU and in evaluation mode.

    path: a folder with config.json and model.safetensors or pytorch_model.bin, also in shards: Qwen3, Qwen3-MoE, Llama,
    or MiniMind's own; or one file, such as MiniMind's full_sft_768.pth. config: in place of the folder's. Without any,
    sizes are read off the shapes, and a warning says what was assumed. dtype: of the weights; None keeps the file's.
    Raises FileNotFoundError for what is not there, ValueError for a foreign architecture, a damaged file and for
    weights that do not fit the config, with their names and shapes. Pickled files are read as tensors only.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is neither a folder nor a file; download the model first, then give its folder"
        )
    settings_file = (path if path.is_dir() else path.parent) / CONFIG_FILE
    if config is None and settings_file.is_file():
        config = load_config(settings_file)
    if config is None and path.is_dir():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}; give config=MiniMindConfig(...), or one weight file")
    weights = {}
    for file in _weight_files(path):
        weights.update(_read_weights(file))
    weights = _split_experts(weights)
    config = config or config_from_shapes(weights, path)
    model = _planned(config)
    if config.tie_word_embeddings:  # written once, under either name
        for here, there in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
            if here in weights:
                weights.setdefault(there, weights[here])
    _check_fit(weights, model, path)
    dtype = _one_dtype(weights, dtype, path)
    weights = {name: _cast(name, value, dtype) for name, value in weights.items()}
    if not config.tie_word_embeddings and weights[HEAD].data_ptr() == weights[EMBEDDING].data_ptr():
        weights[HEAD] = weights[HEAD].clone()  # a file of shared memory; two Parameters must not share it
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    for name in (WEIGHTS_FILE, OLD_WEIGHTS_FILE):
        index = path / f"{name}.index.json"
        if (path / name).is_file():
            return [path / name]
        if index.is_file():
            shards = sorted({path / shard for shard in read_json(index).get("weight_map", {}).values()})
            if missing := [shard.name for shard in shards if not shard.is_file()]:
                raise FileNotFoundError(
                    f"{index} names {len(shards)} files, {len(missing)} of them are missing: {', '.join(missing)}; "
                    f"download them"
                )
            return shards
    raise FileNotFoundError(f"{path} has neither {WEIGHTS_FILE} nor {OLD_WEIGHTS_FILE}, nor an index of shards of one")


def _read_weights(file: Path) -> Weights:
    try:
        if file.suffix == ".safetensors":
            return _safetensors().torch.load_file(file)
        weights = torch.load(file, map_location="cpu", weights_only=True)  # device: a file knows none
    except (PermissionError, MemoryError, ImportError):
        raise
    except Exception as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) cannot be read: it is cut short or damaged, a Git LFS pointer, or "
            f"it holds more than tensors; download or copy it anew ({(str(error) or repr(error)).splitlines()[0]})"
        ) from error
    if isinstance(weights, dict) and isinstance(weights.get("model"), dict):
        weights = weights["model"]  # MiniMind's *_resume.pth: the optimizer lies beside it
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise ValueError(f"{file} holds no state dict, a dictionary of tensors by name; save model.state_dict()")
    return weights


def _split_experts(weights: Weights) -> Weights:
    """transformers stacks a layer's experts into one tensor in memory; each expert's own matrices, by name."""
    split = {}
    for name, value in weights.items():
        start, _, part = name.rpartition(".")
        if start.endswith("mlp.experts") and part == "gate_up_proj":
            gate, up = rearrange(value, "experts (two inside) hidden -> two experts inside hidden", two=2)
            stacked = {"gate_proj": gate, "up_proj": up}
        elif start.endswith("mlp.experts") and part == "down_proj":
            stacked = {"down_proj": value}
        else:
            split[name] = value
            continue
        for matrix, experts in stacked.items():
            split.update({f"{start}.{i}.{matrix}.weight": expert.clone() for i, expert in enumerate(experts)})
    return split


def _planned(config: MiniMindConfig) -> MiniMindForCausalLM:
    with torch.device("meta"):
        return MiniMindForCausalLM(config)


def _check_fit(weights: Weights, model: MiniMindForCausalLM, source: Any) -> None:
    """Raise ValueError with all names that are missing, unexpected, of another shape or not a float type."""
    wanted = {name: list(value.shape) for name, value in model.state_dict().items()}
    found = {name: list(value.shape) for name, value in weights.items()}
    both = [name for name in wanted if name in found]
    problems = {
        "missing": [f"{name} {shape}" for name, shape in wanted.items() if name not in found],
        "unexpected": [f"{name} {shape}" for name, shape in found.items() if name not in wanted],
        "of another shape": [
            f"{name} is {found[name]}, the config says {wanted[name]}" for name in both if found[name] != wanted[name]
        ],
        "without a float type": [
            f"{name} is {weights[name].dtype}" for name in both if not weights[name].is_floating_point()
        ],
        "without values": [f"{name} is on the meta device" for name in both if weights[name].is_meta],
    }
    lines = []
    for kind, names in problems.items():
        lines += [f"{len(names)} {kind}:"] * bool(names) + [f"  {line}" for line in names[:LISTED]]
        lines += [f"  and {len(names) - LISTED} more"] * (len(names) > LISTED)
    if lines:
        raise ValueError(f"the weights of {source} do not fit the config; nothing was done\n" + "\n".join(lines))


def _one_or_two_ends(weights: Weights, config: MiniMindConfig) -> Weights:
    """For the file: a tied matrix once, untied ones in memory of their own."""
    shared = weights[HEAD].data_ptr() == weights[EMBEDDING].data_ptr()
    if not config.tie_word_embeddings:
        return {**weights, HEAD: weights[HEAD].clone()} if shared else weights
    if not shared and not torch.equal(weights[HEAD], weights[EMBEDDING]):
        raise ValueError(
            f"{EMBEDDING} and {HEAD} differ, but the config ties them; call model.tie_weights() to keep the "
            f"embedding's, or use tie_word_embeddings=False to keep both"
        )
    return {name: value for name, value in weights.items() if name != HEAD}


def _one_dtype(weights: Weights, dtype: torch.dtype | None, source: Any) -> torch.dtype:
    found = {value.dtype for value in weights.values()}
    if dtype is None and len(found) > 1:
        raise ValueError(f"{source} mixes {', '.join(sorted(map(str, found)))}; choose one with dtype=")
    dtype = dtype or found.pop()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype is {dtype!r}; give a float type, such as torch.float16")
    return dtype


def _cast(name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    cast = value.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(value.dtype).max and not torch.equal(cast.isfinite(), value.isfinite()):
        raise ValueError(
            f"{name} reaches {value.abs().max().item():g}, but {dtype} ends at {torch.finfo(dtype).max:g}; "
            f"use torch.bfloat16 or torch.float32"
        )
    return cast


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('this needs safetensors: pip install "minimind-core[pretrained]"') from error
    return safetensors
