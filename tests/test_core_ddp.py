"""An expert without tokens under DistributedDataParallel: two real processes on gloo, two training steps each.

The processes import this file and run `process`.
"""

import datetime
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reference import tiny_config, tiny_model
from torch.nn.parallel import DistributedDataParallel
from two_processes import run_two

from minimind_core import MOEFeedForward

PATIENCE = datetime.timedelta(seconds=30)  # of one process that waits for the other
EXPERTS, IDLE, HIDDEN = 4, 3, 64
UNFINISHED = "Expected to have finished reduction in the prior iteration"

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")


class Skipping(MOEFeedForward):
    """Runs only the experts that have tokens, as for inference, also where gradients are wanted."""

    def _dispatch(self, tokens, expert_idx, weight):
        output = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            chosen = (expert_idx == i).nonzero().flatten()
            if len(chosen):
                result = expert(tokens[chosen // self.k]) * weight[chosen, None]
                output = output.index_add(0, chosen // self.k, result)
        return output


def routed(kind: type[MOEFeedForward]) -> MOEFeedForward:
    """A layer whose router sends a token to the expert of its largest feature, with its real probability as weight."""
    config = tiny_config(use_moe=True, num_experts=EXPERTS, num_experts_per_tok=1, norm_topk_prob=False)
    torch.manual_seed(0)
    layer = kind(config)
    with torch.no_grad():
        layer.gate.weight.copy_(8 * torch.eye(EXPERTS, HIDDEN))
    return layer


def train(rank: int, layer: torch.nn.Module, idle: bool, **options) -> dict:
    """Two steps of AdamW. idle: no token of this rank goes to the last expert. Says what happened, ranks compared."""
    parallel = DistributedDataParallel(layer, **options)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    visited = [0, 1, 2, 1 if idle else IDLE]
    x = (1 + rank) * torch.eye(HIDDEN)[visited][None]  # another length on each rank, so other gradients
    weight = layer.experts[IDLE].down_proj.weight
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    for step in range(2):
        try:
            optimizer.zero_grad()
            (parallel(x) - 1).square().mean().backward()
        except RuntimeError as error:
            return {"step": step, "error": str(error)}
        own = weight.grad
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])
    both = [torch.zeros_like(flat), torch.zeros_like(flat)]
    dist.all_gather(both, flat)
    return {
        "error": None,
        "idle gradient": None if own is None else own.abs().max().item(),
        "trained": sum(not torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True)),
        "equal": torch.equal(*both),
    }


def train_model(rank: int) -> dict:
    """Two steps of a whole small model with more experts than either rank's tokens can visit."""
    model = tiny_model(use_moe=True, num_experts=16, num_experts_per_tok=2).train()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(4)[None] + 10 * rank
    for _ in range(2):
        optimizer.zero_grad()
        output = parallel(ids, labels=ids)
        (output.loss + output.aux_loss).backward()
        missing = sum(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    both = [torch.zeros_like(flat), torch.zeros_like(flat)]
    dist.all_gather(both, flat)
    return {"missing": missing, "equal": torch.equal(*both)}


def process(rank: int, folder: str):
    """All trials of one of the two processes; prints what happened in each as a line of JSON."""
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    trials = {
        "core": lambda: train(rank, routed(MOEFeedForward), idle=True),
        "core, one rank idle": lambda: train(rank, routed(MOEFeedForward), idle=rank == 1),
        "skipping": lambda: train(rank, routed(Skipping), idle=True),
        "unused": lambda: train(rank, routed(Skipping), idle=True, find_unused_parameters=True),
        "unused, one rank idle": lambda: train(rank, routed(Skipping), idle=rank == 1, find_unused_parameters=True),
        "model": lambda: train_model(rank),
        "skipping, one rank idle": lambda: train(rank, routed(Skipping), idle=rank == 1),
    }
    for name, trial in trials.items():
        result = trial()
        print(json.dumps({name: result}), flush=True)
        if "one rank idle" in name and result["error"]:
            break  # the ranks did not come out of it together
    os._exit(0)  # a group with a broken connection aborts the process when it is taken down


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """What each of the two processes found."""
    return run_two(Path(__file__).stem, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("trial", ["core", "core, one rank idle"])
def test_an_idle_expert_of_the_core_works_in_default_ddp(results, trial):
    for rank in results:
        assert rank[trial]["error"] is None and rank[trial]["equal"]
        assert rank[trial]["trained"] == 1 + 3 * EXPERTS  # the idle expert too: weight decay
    idle = [rank[trial]["idle gradient"] for rank in results]
    assert idle[0] == idle[1] and (idle[0] == 0) == (trial == "core")  # one rank's gradient reaches both


def test_a_whole_model_with_idle_experts_works_in_default_ddp(results):
    assert all(rank["model"] == {"missing": 0, "equal": True} for rank in results)


def test_skipped_experts_raise_at_the_next_step(results):
    for rank in results:
        assert rank["skipping"]["step"] == 1 and UNFINISHED in rank["skipping"]["error"]


def test_skipped_on_one_rank_stops_both(results):
    """The rank with the idle expert raises at its next step; the other waits inside backward until that one is gone."""
    busy, idle = (rank["skipping, one rank idle"] for rank in results)
    assert idle["step"] == 1 and UNFINISHED in idle["error"]
    assert busy["step"] == 0 and busy["error"]


def test_find_unused_parameters_allows_skipping(results):
    for rank in results:
        for trial in ("unused", "unused, one rank idle"):
            assert rank[trial]["error"] is None and rank[trial]["equal"]
        assert rank["unused"]["idle gradient"] is None  # skipped on every rank: no gradient, so no weight decay either
        assert rank["unused"]["trained"] == 1 + 3 * (EXPERTS - 1)
        assert rank["unused, one rank idle"]["idle gradient"] > 0
