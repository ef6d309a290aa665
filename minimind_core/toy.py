"""Two small trained models that come with the course: pictures of attention and routing need weights that learned.

Their tokens are bytes: ids = list(text.encode()). `make toy-model` trains them anew (python -m minimind_core.toy).
"""

import json
import sys
from pathlib import Path

import torch

from .config import MiniMindConfig
from .data import python_help
from .files import write_atomically, write_text
from .model import MiniMindForCausalLM

CONFIG = MiniMindConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
CONFIGS = {
    "dense": CONFIG,
    "moe": CONFIG.replace(
        use_moe=True,
        num_experts=4,
        num_experts_per_tok=1,
        norm_topk_prob=False,  # so that the router learns from the loss
        moe_intermediate_size=192,
        router_aux_loss_coef=0.01,
    ),
}
STEPS, WARM_UP, BATCH, LENGTH, RATE = 1500, 100, 16, 256, 3e-3
HELD_OUT = 20_000  # bytes at the end of the text that are not trained on; half of them repeat what came before


def weights_file(kind: str) -> Path:
    """Where the weights of a kind of model are; the training log has the same name and ends in .jsonl."""
    if kind not in CONFIGS:
        raise ValueError(f"there is no toy model {kind!r}; choose one of {', '.join(CONFIGS)}")
    return Path(__file__).with_name(f"toy_{kind}.safetensors")


def toy_model(kind: str = "dense") -> MiniMindForCausalLM:
    """A trained model, on the CPU and in evaluation mode: 4 layers of 4 query and 2 K/V heads, a vocabulary of bytes.

    kind: "dense", or "moe" with 4 experts in each layer, one for each token.
    Raises ValueError for another kind, and FileNotFoundError with the way to make it if the weights are missing.
    """
    from safetensors.torch import load_file  # not needed by the rest of the core

    file = weights_file(kind)
    if not file.is_file():
        raise FileNotFoundError(f"{file.name} is missing beside {__name__}; train it by `make toy-model`")
    with torch.device("meta"):
        model = MiniMindForCausalLM(CONFIGS[kind])
    weights = {name: value.float() for name, value in load_file(file).items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    return model.eval()


def text() -> bytes:
    """The text they are trained on: Python's own help pages, which every Python has."""
    return "\n".join(python_help()).encode()


def held_out(data: bytes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples of the text's end, without the paragraphs whose every line also stands in the part that is trained on."""
    known = set(data[:-HELD_OUT].splitlines())
    paragraphs = data[-HELD_OUT:].split(b"\n\n")
    new = [paragraph for paragraph in paragraphs if not known.issuperset(paragraph.splitlines())]
    return [(ids, ids) for ids in torch.tensor(list(b"\n\n".join(new))).unfold(0, LENGTH, LENGTH)]


class Windows(torch.utils.data.Dataset):
    """`count` samples of LENGTH bytes each, from random places of the text."""

    def __init__(self, data: bytes, count: int):
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(0)
        self.places = torch.randint(len(data) - LENGTH, (count,), generator=generator, device=generator.device)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = int(self.places[i])
        ids = self.data[place : place + LENGTH].long()
        return ids, ids


def train(kind: str = "dense", steps: int = STEPS) -> tuple[MiniMindForCausalLM, list[dict]]:
    """Train a model on `text()`. Returns it with a log of the loss in nats per byte, also on held-out text."""
    from .training import Trainer, TrainingSettings

    torch.manual_seed(0)
    data = text()
    settings = TrainingSettings(
        steps=steps, batch_size=BATCH, learning_rate=RATE, warm_up=min(WARM_UP, steps // 2), evaluate_every=100
    )
    trainer = Trainer(
        MiniMindForCausalLM(CONFIGS[kind]),
        Windows(data[:-HELD_OUT], steps * BATCH),
        settings,
        held_out=held_out(data),
    )
    log = []
    for record in trainer.run():
        if record.held_out_loss is not None:
            log.append(
                {
                    "step": record.step,
                    "loss": round(record.loss, 4),
                    "held_out_loss": round(record.held_out_loss, 4),
                    "seconds": round(record.seconds),
                }
            )
            print(kind, log[-1], file=sys.stderr, flush=True)
    return trainer.model.eval(), log


def save(kind: str, model: MiniMindForCausalLM, log: list[dict]) -> None:
    """Write weights (half precision, the tied matrix once) and log: each to a temporary file, which is then renamed."""
    from safetensors.torch import save as serialize

    file = weights_file(kind)
    weights = {name: value.half() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    write_atomically(file, lambda target: target.write(serialize(weights)))
    write_text(file.with_suffix(".jsonl"), "".join(json.dumps(line) + "\n" for line in log))


if __name__ == "__main__":
    for kind in sys.argv[1:] or CONFIGS:
        save(kind, *train(kind))
