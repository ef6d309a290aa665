"""Training in two processes on gloo: the same updates as one process, and a stop that both make at the same place.

The processes import this file and run `process`, as in test_core_ddp.py; the last test starts torchrun itself.
"""

import datetime
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_core_training import CPU, KINDS, after_forward, gradient, make_samples, make_trainer, timeless, weights
from two_processes import run_two

from minimind_core.training import Trainer

LIMIT = 120  # seconds for torchrun
PATIENCE = datetime.timedelta(seconds=30)  # of one process that waits for the other
# labels of each sample, two samples in a micro-batch, four micro-batches in an update
UNEVEN = {
    "7 micro-batches": [
        2,
        9,
        4,
        4,
        1,
        10,
        3,
        7,
        8,
        2,
        5,
        1,
        6,
        3,
    ],  # updates of 4 and 3: the second has nothing at last
    "5 micro-batches": [2, 9, 4, 4, 1, 10, 3, 7, 8, 2],  # updates of 4 and 1: the second process has nothing at all
    "without labels": [3, 0, 0, 0, 5, 2, 0, 0, 0, 4, 0, 0],  # micro-batches with nothing to predict
}
TRIALS = [(kind, name) for kind in KINDS for name in UNEVEN]

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed")


def trainer_of(kind: str, name: str, accumulation: int, **settings) -> Trainer:
    samples = make_samples(len(UNEVEN[name]), UNEVEN[name])
    return make_trainer(
        {**KINDS[kind], "dropout": 0.2}, samples, samples[:7], accumulation=accumulation, clip=None, **settings
    )


def updates(trainer: Trainer) -> dict:
    """The gradient of every update, and what was recorded."""
    gradients, records = [], []
    for record in trainer.run():
        gradients.append(gradient(trainer))
        records.append(list(record._replace(seconds=0)))
    return {"gradients": gradients, "records": records, "weights": weights(trainer).clone()}


def synced(rank: int) -> dict:
    """The flag of DistributedDataParallel in each forward pass."""
    trainer, flags = trainer_of("dense", "7 micro-batches", 2), []

    def note(module, inputs):
        if module.training:
            flags.append(trainer.parallel.require_backward_grad_sync)

    trainer.model.register_forward_pre_hook(note)
    list(trainer.run())
    return {"flags": flags}


def stopped(rank: int, folder: Path) -> dict:
    """One process is told to stop, in the first micro-batch of the second update; the run goes on from the file."""
    whole = trainer_of("moe", "7 micro-batches", 2)
    records = timeless(whole.run())
    trainer = trainer_of("moe", "7 micro-batches", 2)
    if rank == 1:
        after_forward(trainer, 3, lambda: setattr(trainer, "stop", 15))
    first = timeless(trainer.run())
    place, stop = [trainer.step, trainer.micro], trainer.stop
    trainer.save(folder / f"checkpoint-{rank}.pt")
    samples = trainer.samples
    resumed = Trainer.resume(folder / "checkpoint-0.pt", samples, samples[:7], CPU)
    rest = timeless(resumed.run())
    return {
        "place": place,
        "stop": stop,
        "written": (folder / f"checkpoint-{rank}.pt").exists(),
        "records": first + rest == records,
        "weights": torch.equal(weights(resumed), weights(whole)),
    }


def process(rank: int, folder: str):
    """All trials of one of the two processes: gradients go to a file, the rest is printed as lines of JSON."""
    folder = Path(folder)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    warnings.simplefilter("error")
    torch.save({trial: updates(trainer_of(*trial, 2)) for trial in TRIALS}, folder / f"updates-{rank}.pt")
    print(json.dumps({"synced": synced(rank)}), flush=True)
    print(json.dumps({"stopped": stopped(rank, folder)}), flush=True)
    evaluated = trainer_of("dense", "7 micro-batches", 2)
    print(json.dumps({"evaluated": evaluated.evaluate(evaluated.samples)}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads that let go of a tensor late would abort Python's own exit


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def results(folder) -> list[dict]:
    """What each of the two processes printed."""
    return run_two(Path(__file__).stem, folder)


@pytest.mark.parametrize("kind, name", TRIALS)
def test_two_processes_make_the_updates_of_one(results, folder, kind, name):
    """The same gradients, dropout included, where micro-batches are uneven and where a process has nothing to do."""
    one = updates(trainer_of(kind, name, 4))
    for rank in range(2):
        two = torch.load(folder / f"updates-{rank}.pt", weights_only=True)[kind, name]
        assert len(two["gradients"]) == len(one["gradients"]) > 2
        first, expected = two["gradients"][0], one["gradients"][0]
        assert (first - expected).norm() < 1e-6 * expected.norm()
        for found, expected in zip(two["gradients"], one["gradients"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(two["records"], one["records"], rtol=1e-5, atol=1e-7)


def test_both_processes_hold_the_same_weights(results, folder):
    states = [torch.load(folder / f"updates-{rank}.pt", weights_only=True) for rank in range(2)]
    for trial in TRIALS:
        assert torch.equal(states[0][trial]["weights"], states[1][trial]["weights"])
        assert states[0][trial]["records"] == states[1][trial]["records"]


def test_gradients_travel_once_an_update(results):
    """Updates of 4 and 3 micro-batches: two rounds each, also for the process that has nothing left in the second."""
    assert [rank["synced"]["flags"] for rank in results] == [[False, True] * 4] * 2


def test_a_stop_of_one_process_stops_both_and_resuming_is_bit_for_bit(results):
    for rank, result in enumerate(results):
        expected = {"place": [1, 1], "stop": 15, "written": rank == 0, "records": True, "weights": True}
        assert result["stopped"] == expected


def test_evaluation_is_shared(results):
    trainer = trainer_of("dense", "7 micro-batches", 4)
    for rank in results:
        assert rank["evaluated"] == pytest.approx(trainer.evaluate(trainer.samples), rel=1e-6)


def test_amid_an_update_the_number_of_processes_must_stay(results, folder):
    trainer = trainer_of("moe", "7 micro-batches", 4)
    with pytest.raises(ValueError, match="the processes, amid an update, are 2 there, 1 here"):
        Trainer.resume(folder / "checkpoint-0.pt", trainer.samples, None, CPU, settings=trainer.settings)


def test_torchrun_trains_from_the_command_line(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "minimind_core.training", "--out", str(out), "--hidden-size", "16", "--layers", "1"]
    command += ["--length", "32", "--batch-size", "4", "--steps", "3", "--experts", "2", "--held-out", "0.01"]
    environment = {**os.environ, "MINIMIND_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("processes: 2") == done.stderr.count("done: the model is in") == 1  # one speaks for both
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["tokens"] == 3 * 2 * 4 * 31
    assert (out / "model.safetensors").is_file()
