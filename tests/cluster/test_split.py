"""Training is the same however it is split: over processes, accumulation, shards and nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.entrypoints.checkpoints.checkpoint_files import shard_files
from sm_train.entrypoints.checkpoints.sharded_tensors import load_full
from sm_train.entrypoints.job_interface.checkpoint_layout import step_folder_name

from tests.conftest import Cli
from tests.support.cluster.training_jobs import (
    Job,
    create_nodes,
    gradient_norms,
    losses,
    run_nodes,
    tiny_run,
    write_shards,
)
from tests.support.deadline import DEADLINE

pytestmark = pytest.mark.integration

STEPS = 50
BATCH = 8
"""Samples of a step: the whole data set, so that every step has the same ones in any split."""

LOSS_TOLERANCE = 1e-4
"""Relative: sums in another order differ in their last bits (2e-7), and 50 steps of AdamW
amplify that."""

FIRST_NORM_TOLERANCE = 1e-5
"""Relative: the first step's gradients are of equal weights. They are logged before clipping and
AdamW, both of which hide a gradient that is wrong by a factor."""


def job(folder: Path, processes: int, sharding: str = "none", **settings: Any) -> Job:
    """Return a job whose accumulation over ``processes`` makes up the batch."""
    defaults = {
        "preset": "tiny-mmdit",
        "max_steps": STEPS,
        "per_device_batch_size": 2,
        "gradient_accumulation_steps": BATCH // 2 // processes,
        "sharding": sharding,
        "ema_decay": 0.9,
        "checkpoint_every": STEPS,
        "caption_dropout": 0.3,
    }
    return Job(folder, tiny_run(**(defaults | settings)))


def train(folder: Path, processes: int, **settings: Any) -> tuple[Job, list[dict[str, Any]]]:
    """Run a job to its end; return it and its events."""
    finished = job(folder, processes, **settings)
    write_shards(finished.train_channel, shards=2, each=BATCH // 2)
    code, events, text = finished.run(processes)
    assert code == 0, text
    return finished, events


def assert_same_training(events: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    """Compare the gradient norm of the first step, and the losses of all."""
    norm, expected = gradient_norms(events)[1], gradient_norms(reference)[1]
    assert expected > 0
    assert norm == pytest.approx(expected, rel=FIRST_NORM_TOLERANCE)
    assert len(losses(events)) == STEPS
    assert losses(events) == pytest.approx(losses(reference), rel=LOSS_TOLERANCE)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[dict[str, Any]]]:
    """A single process that accumulates four micro-batches."""
    return train(tmp_path_factory.mktemp("single"), 1)


@pytest.mark.slow
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
def test_losses_and_gradients_do_not_depend_on_the_split(
    tmp_path: Path, single: tuple[Job, list[dict[str, Any]]], processes: int, sharding: str
) -> None:
    _, events = train(tmp_path, processes, sharding=sharding)
    assert_same_training(events, single[1])


def test_gradients_do_not_depend_on_the_micro_batches(
    tmp_path: Path, single: tuple[Job, list[dict[str, Any]]]
) -> None:
    """One micro-batch of eight samples instead of four of two."""
    _, events = train(tmp_path, 1, per_device_batch_size=BATCH, gradient_accumulation_steps=1)
    assert_same_training(events, single[1])


@pytest.mark.slow
def test_hybrid_sharding_on_two_nodes_is_the_same(
    tmp_path: Path, single: tuple[Job, list[dict[str, Any]]]
) -> None:
    """Two nodes with two processes each: sharded within a node, replicated across."""
    config = job(tmp_path / "job", 4, sharding="hybrid_shard").config
    nodes = create_nodes(tmp_path, config, 2)
    for number, node in enumerate(nodes):
        write_shards(node.train_channel, shards=2, each=BATCH // 2)
        (node.train_channel / f"shard-{1 - number:03d}.tar").unlink()
    assert_same_training(run_nodes(nodes, 2), single[1])
    # Each node writes a part of the checkpoint: one replica of every shard.
    folders = [node.node_checkpoints / step_folder_name(STEPS) for node in nodes]
    written = [{path.name for path in folder.glob("*.safetensors")} for folder in folders]
    assert not written[0] & written[1]
    assert {path.name for path in shard_files(folders[0])} == written[0] | written[1]


@pytest.mark.slow
def test_final_weights_are_the_same_sharded_or_not(
    tmp_path: Path, single: tuple[Job, list[dict[str, Any]]]
) -> None:
    from diffusers import SD3Transformer2DModel

    sharded, _ = train(tmp_path, 4, sharding="full_shard")
    expected, weights = (
        SD3Transformer2DModel.from_pretrained(finished.base / "model/transformer").state_dict()
        for finished in (single[0], sharded)
    )
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "full_shard"), (1, "none")),
        pytest.param((1, "none"), (4, "full_shard"), marks=pytest.mark.slow),
    ],
)
def test_run_resumes_with_another_sharding_and_world_size(
    tmp_path: Path,
    single: tuple[Job, list[dict[str, Any]]],
    first: tuple[int, str],
    second: tuple[int, str],
) -> None:
    begun, _ = train(
        tmp_path / "begun", first[0], sharding=first[1], max_steps=20, checkpoint_every=20
    )
    resumed = job(tmp_path / "resumed", second[0], sharding=second[1])
    begun.train_channel.parent.parent.rename(resumed.base / "input")
    begun.checkpoints.rename(resumed.checkpoints)
    code, events, text = resumed.run(second[0])
    assert code == 0, text
    resumed_losses, expected = losses(events), losses(single[1])
    assert min(resumed_losses) == 21
    assert resumed_losses == pytest.approx(
        {step: expected[step] for step in resumed_losses}, rel=LOSS_TOLERANCE
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["shard_grad_op", "full_shard"])
def test_killed_sharded_run_resumes_bit_for_bit(tmp_path: Path, sharding: str) -> None:
    """SIGKILL one of three processes; the restart repeats the numbers of an uninterrupted run."""
    settings: dict[str, Any] = {
        "sharding": sharding,
        "max_steps": 20,
        "checkpoint_every": 5,
        "gradient_accumulation_steps": 1,
    }
    _, uninterrupted = train(tmp_path / "uninterrupted", 3, **settings)
    killed = job(tmp_path / "killed", 3, **settings)
    write_shards(killed.train_channel, shards=2, each=BATCH // 2)
    with killed.start(3) as running:
        running.wait_for("checkpoint", step=5)
        os.kill(running.workers()[1], signal.SIGKILL)
        list(running.lines())
        assert running.process.wait(timeout=DEADLINE) != 0
    code, events, text = killed.run(3)
    assert code == 0, text
    resumed, expected = losses(events), losses(uninterrupted)
    assert min(resumed) > 5
    assert resumed == {step: expected[step] for step in resumed}


@pytest.mark.slow
def test_images_are_sampled_from_a_sharded_checkpoint(cli: Cli, tmp_path: Path) -> None:
    finished, _ = train(tmp_path / "job", 2, sharding="full_shard", max_steps=2, checkpoint_every=2)
    folder = finished.checkpoints / step_folder_name(2)
    averages = load_full(shard_files(folder), "ema.")
    assert all(name.startswith("network.") for name in averages)
    (tmp_path / "prompts.txt").write_text("a grey of 1\n")
    grids = []
    for source in (folder, finished.base / "model"):
        result = cli(
            "sample", source, "--prompts", "prompts.txt", "--steps", "2", "--out", "grid.png"
        )
        assert result.returncode == 0, result.stderr
        grids.append((tmp_path / "grid.png").read_bytes())
    assert grids[0] == grids[1]
