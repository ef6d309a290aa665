"""A small trained model that comes with the course: in pictures of attention, random weights show nothing.

Its tokens are bytes: ids = list(text.encode()). `make toy-model` trains it anew (python -m minimind_core.toy).
"""

import json
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path

import torch

from .config import MiniMindConfig
from .device import pick_device
from .model import MiniMindForCausalLM

WEIGHTS = Path(__file__).with_name("toy.safetensors")
LOG = Path(__file__).with_name("toy_training.jsonl")
CONFIG = MiniMindConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
STEPS, WARM_UP, BATCH, LENGTH, RATE = 1500, 100, 16, 256, 3e-3
HELD_OUT = 20_000  # bytes at the end of the text that are not trained on


def toy_model() -> MiniMindForCausalLM:
    """The trained model, on the CPU and in evaluation mode: 4 layers of 4 query and 2 K/V heads, a vocabulary of bytes.

    Raises FileNotFoundError with the way to make it, if the weights are missing.
    """
    from safetensors.torch import load_file  # not needed by the rest of the core

    if not WEIGHTS.is_file():
        raise FileNotFoundError(f"{WEIGHTS.name} is missing beside {__name__}; train it by `make toy-model`")
    with torch.device("meta"):
        model = MiniMindForCausalLM(CONFIG)
    weights = {name: value.float() for name, value in load_file(WEIGHTS).items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    return model.eval()


def text() -> bytes:
    """The text it is trained on: Python's own help pages, which every Python has."""
    return "\n".join(pydoc_data.topics.topics.values()).encode()


def train(steps: int = STEPS, device: torch.device | None = None) -> tuple[MiniMindForCausalLM, list[dict]]:
    """Train the model on `text()`. Returns it with a log of the loss in nats per byte, also on held-out text."""
    device = device or pick_device()
    torch.manual_seed(0)
    model = MiniMindForCausalLM(CONFIG).to(device).train()
    data = torch.tensor(list(text()))
    training, held_out = data[:-HELD_OUT], data[-HELD_OUT:].unfold(0, LENGTH, LENGTH).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - WARM_UP, eta_min=RATE / 10),
        ],
        milestones=[WARM_UP],
    )
    generator, log, start = torch.Generator().manual_seed(0), [], time.monotonic()
    for step in range(1, steps + 1):
        places = torch.randint(len(training) - LENGTH, (BATCH, 1), generator=generator)
        ids = training[places + torch.arange(LENGTH)].to(device)
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 100 == 0 or step == steps:
            with torch.no_grad():
                held_out_loss = model(held_out, labels=held_out).loss.item()
            log.append(
                {
                    "step": step,
                    "loss": round(loss.item(), 4),
                    "held_out_loss": round(held_out_loss, 4),
                    "seconds": round(time.monotonic() - start),
                }
            )
            print(log[-1], file=sys.stderr, flush=True)
    return model.eval(), log


def save(model: MiniMindForCausalLM, log: list[dict]) -> None:
    """Write weights (half precision, the tied matrix once) and log: each to a temporary file, which is then renamed."""
    from safetensors.torch import save_file

    weights = {name: value.half() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    temporary = WEIGHTS.with_suffix(".tmp")
    save_file(weights, temporary)
    os.replace(temporary, WEIGHTS)
    temporary = LOG.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in log), encoding="utf-8")
    os.replace(temporary, LOG)


if __name__ == "__main__":
    save(*train())
