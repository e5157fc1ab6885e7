"""Checkpoints of a user's own loop whose model is sharded over the processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import shard_files
from sm_train.entrypoints.checkpoints.sharded_tensors import load_full
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig

from tests.support.cluster.training_jobs import Job, losses, tiny_run, write_shards

SCRIPT = Path(__file__).parents[2] / "support" / "cluster" / "sharded_loop.py"
SAVED, LAST = 6, 12


def loop(folder: Path, script: str, **settings: Any) -> Job:
    config = tiny_run(max_steps=SAVED, checkpoint_every=3, **settings)
    changes = {"code": ".", "entry": "loop.py"}
    run = RunConfig.model_validate(config.model_dump(mode="json") | changes)
    job = Job(folder, run, code=UserCode({"loop.py": script.encode()}))
    write_shards(job.train_channel, shards=1, each=4)
    return job


def train(job: Job, processes: int, last: int) -> dict[int, float]:
    file = job.bundle / "job.json"
    document = json.loads(file.read_text())
    document["8px"]["stage"]["max_steps"] = last
    file.write_text(json.dumps(document))
    code, events, text = job.run(processes)
    assert code == 0, text
    return losses(events)


def saved(job: Job, step: int, prefix: str) -> dict[str, torch.Tensor]:
    return load_full(shard_files(job.checkpoints / f"step-{step:08d}"), prefix)


@pytest.mark.parametrize("processes", [2, 3])
def test_sharded_model_resumes_bit_for_bit(tmp_path: Path, processes: int) -> None:
    whole = loop(tmp_path / "whole", SCRIPT.read_text())
    expected = train(whole, processes, LAST)
    resumed = loop(tmp_path / "resumed", SCRIPT.read_text())
    first = train(resumed, processes, SAVED)
    second = train(resumed, processes, LAST)
    assert list(second) == list(range(SAVED + 1, LAST + 1))
    assert first | second == expected
    for prefix in ("model.", "optimizer.", "average."):
        theirs, ours = saved(whole, LAST, prefix), saved(resumed, LAST, prefix)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    # Each rank saved rows of its own: together they are the weights.
    assert saved(whole, LAST, "model.0.")["weight"].shape == (13, 5)
    assert saved(whole, LAST, "optimizer.state.0.")["exp_avg"].shape == (13, 5)


@pytest.mark.integration
def test_sharded_model_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    """At a learning rate of 0: what the first saved is what the others hold, save and train on."""
    job = loop(tmp_path, SCRIPT.read_text())
    train(job, 3, SAVED)
    expected = saved(job, SAVED, "")
    frozen = SCRIPT.read_text().replace("optimizer.step()\n", "pass\n")
    for processes, last in ((1, 9), (2, 12), (3, 15)):
        (job.bundle / "loop.py").write_text(frozen)
        train(job, processes, last)
        found = saved(job, last, "")
        unchanged = {name for name in expected if "batches" not in name and "running" not in name}
        assert all(torch.equal(found[name], expected[name]) for name in unchanged)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("average=average", "average=average, notes=Notes()"),
            "Checkpointer: notes: seen is a set, which a checkpoint cannot hold; its state must be",
        ),
        (
            ("torch.optim.AdamW(", "Odd("),
            "Checkpointer: optimizer: state.0.history is a deque, which a checkpoint cannot hold",
        ),
        (
            ("nn.BatchNorm1d(13)", "nn.BatchNorm1d(13).to(torch.complex64)"),
            "Checkpointer: model: 1.weight is of type torch.complex64, which a checkpoint cannot",
        ),
    ],
)
def test_state_that_cannot_be_saved_is_refused_before_the_first_step(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    classes = """
import collections


class Notes:
    def state_dict(self):
        return {"seen": set()}

    def load_state_dict(self, state):
        pass


class Odd(torch.optim.AdamW):
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["history"] = collections.deque()


def main("""
    script = SCRIPT.read_text().replace(*change).replace("def main(", classes, 1)
    job = loop(tmp_path, script)
    code, events, text = job.run(2)
    assert code != 0
    assert message in text
    assert not losses(events)
    assert not list(job.checkpoints.glob("step-*"))
