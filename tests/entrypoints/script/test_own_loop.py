"""The documented loop on the public building blocks: trained, killed, resumed, stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import shard_files
from sm_train.entrypoints.checkpoints.sharded_tensors import load_full
from sm_train.estimators.bundle.user_code import UserCode
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.records.checkpoints import local_checkpoints

from tests.support.cluster.training_jobs import (
    Job,
    create_nodes,
    losses,
    run_nodes,
    start_nodes,
    tiny_run,
    write_shards,
)
from tests.support.deadline import DEADLINE

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "own_loop.py"


def loop_nodes(folder: Path, **settings: Any) -> list[Job]:
    config = tiny_run(**({"max_steps": 24, "checkpoint_every": 5} | settings))
    changes = {
        "code": ".",
        "entry": "own_loop.py",
        "data": {"uri": "s3://own/shards/", "sharded": True},
    }
    run = RunConfig.model_validate(config.model_dump(mode="json") | changes)
    nodes = create_nodes(folder, run, 2, UserCode({"own_loop.py": EXAMPLE.read_bytes()}))
    for number, node in enumerate(nodes):
        write_shards(node.train_channel, shards=1, each=40 + 3 * number)
        (node.train_channel / "shard-000.tar").rename(node.train_channel / f"s-{number}.tar")
    return nodes


def weights(job: Job, step: int) -> dict[str, torch.Tensor]:
    return load_full(shard_files(job.checkpoints / f"step-{step:08d}"), "model.")


def position(job: Job, step: int) -> Any:
    folder = job.checkpoints / f"step-{step:08d}"
    return json.loads((folder / "state.json").read_text())["data"]


def python(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with the package that a job gets, whatever is installed here."""
    bundle = Job(folder, tiny_run(max_steps=1)).bundle
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=bundle, capture_output=True, text=True, check=True)


STEPS = 150
"""So many that the run is not over when a busy machine sends the kill, ten steps later."""


@pytest.mark.slow
@pytest.mark.integration
def test_example_is_short_and_loses_nothing_when_it_is_killed(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    whole = loop_nodes(tmp_path / "whole", max_steps=STEPS)
    expected = run_nodes(whole, 1)
    [start] = [event for event in expected if event["kind"] == "start"]
    assert (start["world_size"], start["nodes"], start["effective_batch_size"]) == (2, 2, 8)
    [end] = [event for event in expected if event["kind"] == "end"]
    assert (end["reason"], end["step"], end["images"]) == ("done", STEPS, 8 * STEPS)
    assert (whole[0].checkpoints / "final" / "model.pt").exists()
    nodes = loop_nodes(tmp_path / "killed", max_steps=STEPS)
    with start_nodes(nodes, 1) as running:
        running[0].wait_for("checkpoint", step=10)
        for node in running:
            for pid in node.workers():
                os.kill(pid, signal.SIGKILL)
    resumed = run_nodes(nodes, 1)
    [start] = [event for event in resumed if event["kind"] == "start"]
    assert start["resumed_from_step"] >= 10
    after = losses(resumed)
    assert min(after) == start["resumed_from_step"] + 1
    assert after == {step: loss for step, loss in losses(expected).items() if step in after}
    assert position(whole[0], STEPS) == position(nodes[0], STEPS)
    first, second = weights(whole[0], STEPS), weights(nodes[0], STEPS)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.integration
def test_stop_takes_place_after_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    nodes = loop_nodes(tmp_path, max_steps=10**6, checkpoint_every=10**6)
    with start_nodes(nodes, 1) as running:
        running[0].wait_for("step", step=3)
        (nodes[1].base / "stop-requested").touch()
        end = running[0].wait_for("end")
        assert end["reason"] == "sigterm"
        for node in running:
            list(node.lines())
            assert node.process.wait(timeout=DEADLINE) == 0
    stored = local_checkpoints(nodes[0].checkpoints)
    assert (stored.step, stored.final) == (end["step"], False)


@pytest.mark.integration
def test_importing_the_package_imports_no_library(tmp_path: Path) -> None:
    program = (
        "import sys, sm_train; print(*sys.modules); print(sm_train.__all__, file=sys.stderr); "
        "sm_train.ShardDataset"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "boto3", "sagemaker"} & set(ran.stdout.split())
    assert "current_job" in ran.stderr


@pytest.mark.integration
def test_building_blocks_need_a_job(tmp_path: Path) -> None:
    program = (
        "import sm_train\n"
        "for call in (sm_train.current_job, sm_train.ShardDataset, sm_train.EventLog,\n"
        "             lambda: sm_train.ShardDataset('shards', batch_size=4)):\n"
        "    try:\n"
        "        call()\n"
        "    except sm_train.Error as error:\n"
        "        print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *without_job, incomplete = ran.stdout.splitlines()
    assert len(without_job) == 3
    assert all("sm-train submit run.yaml --local" in line for line in without_job)
    assert incomplete.endswith("outside of a job, pass resolution, seed, decode_workers")
