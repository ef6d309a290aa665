"""How fast is the core? `make bench` measures it beside two others and the limits of the machine, in one run.

Same weights, float32, two threads, in turns (core, plain, transformers, limit, core, ...), median of five rounds.
"plain" runs every part the way that MiniMind's source does: a cache that is concatenated, K/V heads copied, attention
written out when there is a past, one masked pass per expert, nn.Linear.
    step        forward, loss, backward on 2 x 340 tokens, no optimizer; limit: the same FLOPs as plain matmuls
    prefill     1 x 1024 tokens with a cache, last logits only; limit: the same FLOPs as plain matmuls
    decode      128 greedy tokens after a prompt of 32, batch 1 and 8; limit: each active weight read once per step
    experts     one MoE layer of width 768, forward and backward on 2 x 340 tokens, beside each experts_implementation
                of transformers' Qwen3-MoE, but for batched_mm, which copies a weight per token; limit: the same FLOPs
Peak memory is measured in processes of their own. Times depend on the machine; ratios of one run are what counts.
"""

import argparse
import copy
import ctypes
import json
import math
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from minimind_core import (
    Attention,
    LayerCache,
    MiniMindConfig,
    MiniMindForCausalLM,
    MOEFeedForward,
    apply_rotary_pos_emb,
    count_parameters,
    repeat_kv,
)
from minimind_core.linear import Linear

MODELS = {"dense 63.9M": MiniMindConfig.minimind_3, "MoE 198M": MiniMindConfig.minimind_3_moe}
ROUNDS, THREADS, NEW_TOKENS, PROMPT = 5, 2, 128, 32


def ids(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(3, 6400, (batch, seq), generator=torch.Generator().manual_seed(0))


def core_model(name: str):
    torch.manual_seed(0)
    # the released forward (k = 1, renormalized) needs no router gradient here; False gives transformers the same work
    changes = {} if name.startswith("dense") else {"norm_topk_prob": False}
    return MiniMindForCausalLM(MODELS[name](**changes)).eval()


def transformers_model(core):
    from reference import to_transformers

    return to_transformers(core, attn_implementation="sdpa").eval()


class PlainAttention(Attention):
    """As MiniMind's source runs it: the past is concatenated, and with one the weights are written out."""

    def forward(self, x, position_embeddings, past_key_value=None, use_cache=False, attention_mask=None):
        batch, seq, _ = x.shape
        q, k, v = (proj(x).view(batch, seq, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(self.q_norm(q), self.k_norm(k), *position_embeddings)
        had_past = past_key_value is not None and past_key_value.length > 0
        if had_past:
            k, v = (torch.cat([old, new], dim=1) for old, new in zip(past_key_value, (k, v), strict=True))
        present = LayerCache(k, v) if use_cache else None
        q, k, v = (x.transpose(1, 2) for x in (q, repeat_kv(k, self.n_rep), repeat_kv(v, self.n_rep)))
        if seq > 1 and not had_past:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            scores[..., -seq:] += torch.full((seq, seq), float("-inf")).triu(1)
            mixed = scores.softmax(dim=-1) @ v
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1)), present


class PlainMoE(MOEFeedForward):
    """One masked pass over the tokens for each expert."""

    def _dispatch(self, tokens, expert_idx, weight):
        output = torch.zeros_like(tokens)
        chosen, weights = expert_idx.view(-1, self.k), weight.view(-1, self.k)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                token = mask.any(dim=-1).nonzero().flatten()
                output.index_add_(0, token, expert(tokens[token]) * weights[mask].view(-1, 1))
            elif self.training:
                output[0, 0] += 0 * sum(parameter.sum() for parameter in expert.parameters())
        return output


PLAIN = {Attention: PlainAttention, MOEFeedForward: PlainMoE, Linear: nn.Linear}


def plain_model(core):
    model = copy.deepcopy(core)
    for module in model.modules():
        module.__class__ = PLAIN.get(type(module), type(module))
    return model.eval()


def step(model):
    model.train()
    batch = ids(2, 340)
    model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad(set_to_none=True)
    model.eval()


@torch.no_grad()
def prefill(model):
    model(input_ids=ids(1, 1024), use_cache=True, logits_to_keep=1)


def decode(model, batch: int):
    prompt = ids(batch, PROMPT)
    if isinstance(model, MiniMindForCausalLM):
        model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    else:
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length)


TASKS = {  # a training step leaves out the optimizer, which is the same for all
    "step 2 x 340": step,
    "prefill 1 x 1024": prefill,
    "decode 128, batch 1": lambda model: decode(model, 1),
    "decode 128, batch 8": lambda model: decode(model, 8),
}


def matrices(core) -> list[torch.Tensor]:
    """The weight matrices that one token visits (of an MoE: k experts)."""
    idle = {
        id(parameter)
        for layer in core.model.layers
        if hasattr(layer.mlp, "experts")
        for expert in layer.mlp.experts[layer.mlp.k :]
        for parameter in expert.parameters()
    }
    return [p.detach() for p in core.parameters() if p.ndim == 2 and id(p) not in idle]


@torch.no_grad()
def matmul_limit(core, tokens: int, batch: int, backward: bool) -> float:
    """Seconds for the model's matrix products alone: every weight matrix, and scores and mixing of attention."""
    config, products = core.config, []
    seq = tokens // batch
    for weight in matrices(core):
        out, inside = weight.shape
        is_head = out == config.vocab_size
        rows = 1 if is_head and not backward else tokens
        x, grad = torch.randn(rows, inside), torch.randn(rows, out)
        products.append((x, weight.t()))
        if backward:
            products += [(grad, weight), (grad.t(), x)]
    heads, head_dim = config.num_attention_heads, config.head_dim
    q, k, scores = (torch.randn(batch * heads, *shape) for shape in ((seq, head_dim), (head_dim, seq), (seq, seq)))
    attention = [(q, k), (scores, q)] * config.num_hidden_layers
    start = time.perf_counter()
    for a, b in products + attention * (3 if backward else 1):
        a @ b
    return time.perf_counter() - start


def read_limit(core) -> float:
    """Seconds to read each active weight matrix once per new token."""
    weights = matrices(core)
    start = time.perf_counter()
    for _ in range(NEW_TOKENS):
        for weight in weights:
            weight.sum()
    return time.perf_counter() - start


TOKENS = {
    "step 2 x 340": 680,
    "prefill 1 x 1024": 1024,
    "decode 128, batch 1": NEW_TOKENS,
    "decode 128, batch 8": 8 * NEW_TOKENS,
}
LIMITS = {
    "step 2 x 340": lambda core: matmul_limit(core, 680, 2, backward=True),
    "prefill 1 x 1024": lambda core: matmul_limit(core, 1024, 1, backward=False),
    "decode 128, batch 1": read_limit,
    "decode 128, batch 8": read_limit,
}


def seconds(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def spread(values: list[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def compare(name: str, rounds: int, wanted: str):
    core = core_model(name)
    models = {"core": core, "plain": plain_model(core), "transformers": transformers_model(core)}
    prompt = ids(2, 40)
    with torch.no_grad():
        logits = [model(input_ids=prompt).logits for model in models.values()]
    assert all(torch.allclose(other, logits[0], atol=1e-4) for other in logits)
    print(f"\n{name}: {count_parameters(core).total:,} parameters. Tokens per second: median (least-most) of {rounds}.")
    print(
        f"{'':20}"
        + "".join(f"  {column:>19}" for column in (*models, "limit"))
        + "  core/plain  core/transf.  of limit"
    )
    for task, run in TASKS.items():
        if wanted not in task:
            continue
        for model in models.values():
            run(model)  # warm up
        times = {column: [] for column in (*models, "limit")}
        for _ in range(rounds):
            for column, model in models.items():
                times[column].append(seconds(run, model))
            times["limit"].append(LIMITS[task](core))
        rates = {column: [TOKENS[task] / value for value in values] for column, values in times.items()}
        middle = {column: statistics.median(values) for column, values in rates.items()}
        print(
            f"{task:20}"
            + "".join(f"  {spread(values, 0):>19}" for values in rates.values())
            + f"  {middle['core'] / middle['plain']:10.2f}  {middle['core'] / middle['transformers']:12.2f}"
            + f"  {middle['core'] / middle['limit']:8.0%}",
            flush=True,
        )


def experts_pair(experts: int, k: int):
    """One MoE layer of the core and, with the same weights, one of transformers for each way to run its experts."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = MiniMindConfig.minimind_3_moe(num_experts=experts, num_experts_per_tok=k, norm_topk_prob=k > 1)
    torch.manual_seed(0)
    core = MOEFeedForward(config)
    weights = {
        "gate.weight": core.gate.weight,
        "experts.gate_up_proj": torch.stack([torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in core.experts]),
        "experts.down_proj": torch.stack([e.down_proj.weight for e in core.experts]),
    }
    layers = {"core": core}
    for implementation in ("eager", "grouped_mm"):
        fields = {name: getattr(config, name) for name in ("hidden_size", "num_experts", "num_experts_per_tok")}
        fields |= {"moe_intermediate_size": config.moe_intermediate_size, "norm_topk_prob": config.norm_topk_prob}
        layer = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**fields, experts_implementation=implementation))
        layer.load_state_dict({name: weight.detach() for name, weight in weights.items()})
        layers[implementation] = layer
    return layers


def experts_step(layer, x: torch.Tensor) -> torch.Tensor:
    output = layer(x)
    output.square().mean().backward()
    layer.zero_grad(set_to_none=True)
    return output.detach()


def experts_limit(layer, tokens: int) -> float:
    """Seconds for the matrix products of k experts per token, forward and backward, as three plain products each."""
    expert, rows = layer.experts[0], tokens * layer.k // len(layer.experts)
    products = []
    for weight in (expert.gate_proj.weight.detach(), expert.up_proj.weight.detach(), expert.down_proj.weight.detach()):
        x, grad = torch.randn(rows, weight.shape[1]), torch.randn(rows, weight.shape[0])
        products += [(x, weight.t()), (grad, weight), (grad.t(), x)]
    start = time.perf_counter()
    for _ in layer.experts:
        for a, b in products:
            a @ b
    return time.perf_counter() - start


def compare_experts(rounds: int):
    x = torch.randn(2, 340, 768, generator=torch.Generator().manual_seed(0))
    print("\nOne MoE layer, forward and backward on 2 x 340 tokens. Seconds.")
    for experts, k in ((4, 1), (16, 2)):
        layers = experts_pair(experts, k)
        outputs = {name: experts_step(layer, x) for name, layer in layers.items()}  # warm up, and the same numbers?
        assert all(torch.allclose(output, outputs["core"], atol=1e-5) for output in outputs.values())
        times = {name: [] for name in (*layers, "limit")}
        for _ in range(rounds):
            for name, layer in layers.items():
                times[name].append(seconds(experts_step, layer, x))
            times["limit"].append(experts_limit(layers["core"], x.shape[0] * x.shape[1]))
        middle = {name: statistics.median(values) for name, values in times.items()}
        fastest = min(middle["eager"], middle["grouped_mm"])
        print(
            f"E = {experts:2}, k = {k}  "
            + "  ".join(f"{name} {spread(values)}" for name, values in times.items())
            + f"  fastest/core {fastest / middle['core']:.2f}  limit/core {middle['limit'] / middle['core']:.2f}",
            flush=True,
        )


def memory_here(name: str, which: str, task: str) -> float:
    """MB by which the task raises the peak of this process above the built model. Linux only."""
    model = core_model(name)
    if which == "transformers":
        model = transformers_model(model)

    def status(field: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(field))

    with torch.no_grad():
        model(input_ids=ids(1, 8))  # the libraries' own buffers exist from now on
    ctypes.CDLL(None).malloc_trim(0)  # memory that building has freed goes back to the system
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset_peak:
        reset_peak.write("5")
    TASKS[task](model)
    return (status("VmHWM") - before) / 1024


def compare_memory():
    print("\nPeak memory above the built model, MB (middle of three processes)")
    for name in MODELS:
        for task in ("step 2 x 340", "prefill 1 x 1024", "decode 128, batch 8"):
            peaks = {}
            for which in ("core", "transformers"):
                command = [sys.executable, __file__, "--memory-of", name, which, task]
                runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
                peaks[which] = statistics.median(json.loads(run.stdout.splitlines()[-1]) for run in runs)
            print(
                f"{name:12} {task:20}  core {peaks['core']:6.0f}  transformers {peaks['transformers']:6.0f}", flush=True
            )


def import_cost() -> float:
    """Seconds of `import minimind_core` beyond `import torch`: the smallest of five processes."""
    code = "import time, torch; t = time.perf_counter(); import minimind_core; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--only", default="", metavar="WORD", help="tasks that contain this word, such as decode; no memory"
    )
    parser.add_argument("--memory-of", nargs=3, metavar=("MODEL", "WHICH", "TASK"), help="for this script's own use")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.memory_of:
        print(json.dumps(memory_here(*arguments.memory_of)))
        return
    print(f"PyTorch {torch.__version__}, {THREADS} threads. import minimind_core: {import_cost():.3f} s beyond torch")
    for name in MODELS:
        if any(arguments.only in task for task in TASKS):
            compare(name, arguments.rounds, arguments.only)
    if arguments.only in "experts":
        compare_experts(arguments.rounds)
    if sys.platform == "linux" and not arguments.only:
        compare_memory()


if __name__ == "__main__":
    main()
