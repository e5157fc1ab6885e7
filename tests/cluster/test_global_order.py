"""Training on the same samples in the same steps, however many processes there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.training_jobs import (
    create_nodes,
    losses,
    run_nodes,
    tiny_run,
    write_shards,
)

pytestmark = pytest.mark.integration

STEPS = 6
"""Steps of 8 samples: 40 samples are an epoch of 5 steps."""


def train(folder: Path, nodes: int, processes: int, **settings: Any) -> list[dict[str, Any]]:
    """Train on ``nodes`` that all see every shard; 8 samples per optimizer step."""
    config = tiny_run(
        **({"max_steps": STEPS} | settings),
        per_device_batch_size=2,
        gradient_accumulation_steps=4 // (nodes * processes),
    )
    jobs = create_nodes(folder, config, nodes)
    for job in jobs:
        write_shards(job.train_channel, shards=4, each=10)
    return run_nodes(jobs, processes)


def warned(events: list[dict[str, Any]]) -> set[str]:
    return {event["code"] for event in events if event["kind"] == "warning"}


@pytest.mark.slow
def test_losses_are_equal_for_any_placement_of_the_ranks(tmp_path: Path) -> None:
    expected = losses(train(tmp_path / "1x4", 1, 4))
    assert set(expected) == set(range(1, STEPS + 1))
    for nodes, processes in ((2, 2), (4, 1)):
        events = train(tmp_path / f"{nodes}x{processes}", nodes, processes)
        assert losses(events) == pytest.approx(expected, rel=1e-6)
        assert "order-depends-on-ranks" not in warned(events)


@pytest.mark.slow
def test_resumed_epoch_continues_on_fewer_processes(tmp_path: Path) -> None:
    """Two nodes with one process each stop in the middle of the epoch; one process continues."""
    expected = losses(train(tmp_path / "whole", 1, 1))
    train(tmp_path / "part", 2, 1, max_steps=3)
    (tmp_path / "part" / "algo-1").rename(tmp_path / "first")
    resumed = train(tmp_path / "part", 1, 1)
    after = losses(resumed)
    assert set(after) == {4, 5, 6}
    assert after == pytest.approx({step: expected[step] for step in after}, rel=1e-4)
    assert "data-resharded" not in warned(resumed)


def test_sharded_channel_is_reported_once(tmp_path: Path) -> None:
    config = tiny_run(max_steps=2)
    jobs = create_nodes(tmp_path, config, 2)
    for number, job in enumerate(jobs):
        write_shards(job.train_channel, shards=1, each=10)
        (job.train_channel / "shard-000.tar").rename(job.train_channel / f"s-{number}.tar")
    events = run_nodes(jobs, 1)
    notes = [event for event in events if event.get("code") == "order-depends-on-ranks"]
    assert [note["rank"] for note in notes] == [0]
    assert "data.sharded: false" in notes[0]["message"]
