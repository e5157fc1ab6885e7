"""The same training whatever it is split into: processes, accumulation, sharding, machines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.entrypoints.checkpointing.manifest import shard_files
from sm_train.entrypoints.checkpointing.sharded_tensors import load_full

from tests.conftest import Cli
from tests.support.cluster.training_jobs import Job, losses, run_nodes, tiny_run, write_shards

STEPS = 50
BATCH = 8
"""Samples of a step: all there are, so that a step has the same ones however they are dealt."""

TOLERANCE = 1e-4
"""Of a loss, relative: sums in another order differ in their last bits (2e-7), and 50 steps of
AdamW carry that on; gradients that were wrong by a factor or a micro-batch would show at once."""


def job(folder: Path, processes: int, sharding: str = "none", **settings: Any) -> Job:
    """Of ``processes`` and as much accumulation as makes up the batch."""
    own = {
        "preset": "tiny-mmdit",
        "max_steps": STEPS,
        "per_device_batch_size": 2,
        "gradient_accumulation_steps": BATCH // 2 // processes,
        "sharding": sharding,
        "ema_decay": 0.9,
        "checkpoint_every": STEPS,
        "caption_dropout": 0.3,
    }
    return Job(folder, tiny_run(**(own | settings)))


def trained(folder: Path, processes: int, **settings: Any) -> tuple[Job, dict[int, float]]:
    made = job(folder, processes, **settings)
    write_shards(made.train_channel, shards=2, each=BATCH // 2)
    code, events, text = made.run(processes)
    assert code == 0, text
    return made, losses(events)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict[int, float]]:
    """One process that accumulates four micro-batches."""
    return trained(tmp_path_factory.mktemp("alone"), 1)


@pytest.mark.parametrize(
    ("processes", "sharding"),
    [
        (2, "full_shard"),
        *(
            pytest.param(processes, sharding, marks=pytest.mark.slow)
            for processes, sharding in (
                (2, "none"),
                (4, "none"),
                (2, "shard_grad_op"),
                (4, "shard_grad_op"),
                (4, "full_shard"),
            )
        ),
    ],
)
def test_the_loss_is_the_same_however_a_batch_is_split(
    tmp_path: Path, alone: tuple[Job, dict[int, float]], processes: int, sharding: str
) -> None:
    _, found = trained(tmp_path, processes, sharding=sharding)
    assert len(found) == STEPS
    assert found == pytest.approx(alone[1], rel=TOLERANCE)


@pytest.mark.slow
def test_hybrid_sharding_on_two_machines_is_the_same(
    tmp_path: Path, alone: tuple[Job, dict[int, float]]
) -> None:
    """Two machines with two processes each: split inside, replicated across."""
    nodes = [job(tmp_path / name, 4, sharding="hybrid_shard") for name in ("one", "two")]
    for number, node in enumerate(nodes):
        write_shards(node.train_channel, shards=2, each=BATCH // 2)
        (node.train_channel / f"shard-{1 - number:03d}.tar").unlink()
    found = losses(run_nodes(nodes, 2))
    assert found == pytest.approx(alone[1], rel=TOLERANCE)
    # Each machine's share of the checkpoint: of every piece one copy is written.
    final = [node.checkpoints / f"step-{STEPS:08d}" for node in nodes]
    marker = json.loads((final[0] / "complete.json").read_text())
    written = {path.name for folder in final for path in folder.glob("tensors-*")}
    assert written == {file["name"] for file in marker["files"] if "tensors" in file["name"]}


@pytest.mark.slow
def test_the_final_weights_are_the_same_sharded_or_not(
    tmp_path: Path, alone: tuple[Job, dict[int, float]]
) -> None:
    from diffusers import SD3Transformer2DModel

    made, _ = trained(tmp_path, 4, sharding="full_shard")
    models = [
        SD3Transformer2DModel.from_pretrained(one.base / "model" / "transformer").state_dict()
        for one in (alone[0], made)
    ]
    for name, weight in models[0].items():
        torch.testing.assert_close(models[1][name], weight, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, "full_shard"), (1, "none")),
        pytest.param((1, "none"), (4, "full_shard"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_sharding_and_world_size(
    tmp_path: Path,
    alone: tuple[Job, dict[int, float]],
    first: tuple[int, str],
    then: tuple[int, str],
) -> None:
    begun, _ = trained(
        tmp_path / "begun", first[0], sharding=first[1], max_steps=20, checkpoint_every=20
    )
    rest = job(tmp_path / "rest", then[0], sharding=then[1])
    begun.train_channel.parent.parent.rename(rest.base / "input")
    begun.checkpoints.rename(rest.checkpoints)
    code, events, text = rest.run(then[0])
    assert code == 0, text
    found = losses(events)
    assert min(found) == 21
    assert found == pytest.approx({step: alone[1][step] for step in found}, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["shard_grad_op", "full_shard"])
def test_a_sharded_run_goes_on_bit_for_bit(tmp_path: Path, sharding: str) -> None:
    """SIGKILL one of three processes; the restart repeats the numbers of an uninterrupted run."""
    settings: dict[str, Any] = {
        "sharding": sharding,
        "max_steps": 20,
        "checkpoint_every": 5,
        "gradient_accumulation_steps": 1,
    }
    _, whole = trained(tmp_path / "whole", 3, **settings)
    cut = job(tmp_path / "cut", 3, **settings)
    write_shards(cut.train_channel, shards=2, each=BATCH // 2)
    with cut.start(3) as running:
        running.wait_for("checkpoint", step=5)
        os.kill(running.workers()[1], signal.SIGKILL)
        list(running.lines())
        assert running.process.wait(timeout=60) != 0
    code, events, text = cut.run(3)
    assert code == 0, text
    resumed = losses(events)
    assert min(resumed) > 5
    assert resumed == {step: whole[step] for step in resumed}


@pytest.mark.slow
def test_pieces_of_a_sharded_checkpoint_are_drawn_from(cli: Cli, tmp_path: Path) -> None:
    made, _ = trained(tmp_path / "job", 2, sharding="full_shard", max_steps=2, checkpoint_every=2)
    folder = made.checkpoints / "step-00000002"
    stored = load_full(shard_files(folder), "ema.")
    assert all(name.startswith("network.") for name in stored)
    (tmp_path / "prompts.txt").write_text("a grey of 1\n")
    pictures = []
    for place in (folder, made.base / "model"):
        result = cli(
            "sample", place, "--prompts", "prompts.txt", "--steps", "2", "--out", "grid.png"
        )
        assert result.returncode == 0, result.stderr
        pictures.append((tmp_path / "grid.png").read_bytes())
    assert pictures[0] == pictures[1]
