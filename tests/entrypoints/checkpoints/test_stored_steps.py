"""What is complete in storage stays there, whatever a node's uploads do."""

from __future__ import annotations

import io
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sm_train.entrypoints.checkpoints import checkpoint_files
from sm_train.entrypoints.checkpoints.async_checkpointer import AsyncCheckpointer, CheckpointRank
from sm_train.entrypoints.checkpoints.background import BackgroundWork
from sm_train.entrypoints.checkpoints.sharded_tensors import ShardSpec
from sm_train.entrypoints.checkpoints.stored_steps import StoredSteps
from sm_train.entrypoints.distributed.local_shard import LocalShard
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.toolkit.records.job_logs import parse_events
from sm_train.toolkit.submit.local.emulated_checkpoint_sync import NodeUploads

NODES = 2


class Cluster:
    """Nodes with a rank each, whose folders are uploaded to ``s3`` as SageMaker does."""

    def __init__(self, folder: Path, *, keep: int, resumed: int | None = None) -> None:
        self.s3, self.log = folder / "s3", io.StringIO()
        self.folders = [folder / f"node-{node}-{resumed}" for node in range(NODES)]
        lock, randomness = threading.Lock(), random.Random(0)
        self.uploads = [
            NodeUploads(self.s3, folder, lock, random.Random(randomness.random()))
            for folder in self.folders
        ]
        self._barrier = threading.Barrier(NODES)
        self._values: list[Any] = [None] * NODES
        self._pool = ThreadPoolExecutor(NODES)
        self.ranks = [self._rank(node, keep, resumed) for node in range(NODES)]

    def _rank(self, node: int, keep: int, resumed: int | None) -> AsyncCheckpointer:
        stored = StoredSteps(self.folders[node])
        if resumed is not None:
            stored.restored(resumed)

        def all_gather(value: Any) -> list[Any]:
            self._values[node] = value
            self._barrier.wait()
            values = [*self._values]
            self._barrier.wait()
            return values

        return AsyncCheckpointer(
            self.folders[node],
            CheckpointRank(node, NODES, node, 0, 1),
            fingerprint="same",
            keep=keep,
            events=EventLog(node=node, rank=node, stream=self.log),
            all_gather=all_gather,
            background=BackgroundWork(torch.device("cpu")),
            stored=stored,
        )

    def save(self, step: int) -> None:
        def save(rank: AsyncCheckpointer) -> None:
            node = rank.rank.node_rank
            tensor = torch.full((4,), float(step))
            spec = ShardSpec("w", (4 * node,))
            rank.save_async(step, {spec: LocalShard(tensor, 0, 1, 0)}, {}, {})
            rank.wait()
            rank.commit()

        for done in [self._pool.submit(save, rank) for rank in self.ranks]:
            done.result()

    def upload(self, *nodes: int) -> None:
        """Upload what these nodes have, and delete in S3 what they deleted."""
        for node in nodes:
            for name in self.uploads[node].changed():
                assert self.uploads[node].upload(name)
            self.uploads[node].delete_removed()

    def stored(self) -> list[int]:
        """Return the steps of the checkpoints that are complete in S3, newest first."""
        steps = []
        for folder in checkpoint_files.step_folders(self.s3):
            try:
                steps.append(checkpoint_files.read_marker(folder).step)
            except checkpoint_files.CheckpointError:
                continue
        return steps

    def logged(self) -> list[tuple[int, int | None]]:
        """Return step and stored step of each checkpoint event."""
        events = parse_events(self.log.getvalue().splitlines())
        return [
            (event["step"], event["stored_step"])
            for event in events
            if event["kind"] == "checkpoint"
        ]

    def kept(self, node: int) -> list[str]:
        return sorted(folder.name for folder in checkpoint_files.step_folders(self.folders[node]))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_newest_stored_checkpoint_stays_while_a_nodes_uploads_fail(
    tmp_path: Path, keep: int
) -> None:
    cluster = Cluster(tmp_path, keep=keep)
    cluster.save(10)
    cluster.upload(0, 1)
    assert cluster.stored() == [10]
    for step in range(20, 120, 10):
        cluster.save(step)
        cluster.upload(0)
        assert cluster.stored() == [10]
    assert cluster.logged()[-1] == (110, 10)
    # The stored one, the one that waits for its upload, the kept ones and the newest.
    assert len(cluster.kept(0)) <= keep + 3
    cluster.upload(1)
    assert 110 in cluster.stored()
    for step in range(120, 150, 10):
        cluster.save(step)
        cluster.upload(0, 1)
    assert cluster.stored()[0] == 140
    assert 10 not in cluster.stored()
    # What was stored is known at the next checkpoint.
    assert len(cluster.kept(1)) <= keep + 2


def test_uploads_slower_than_the_interval_complete_a_checkpoint(tmp_path: Path) -> None:
    """With one kept checkpoint, the second node needs the time of four to upload one."""
    cluster = Cluster(tmp_path, keep=1)
    newest = []
    for step in range(10, 210, 10):
        cluster.save(step)
        cluster.upload(0)
        oldest = min(
            (name for name in cluster.uploads[1].changed() if name.startswith("step-")),
            default=None,
        )
        if oldest is not None and step % 20 == 0:
            assert cluster.uploads[1].upload(oldest)
            cluster.uploads[1].delete_removed()
        newest.append(max(cluster.stored(), default=0))
    assert newest == sorted(newest), "storage lost its newest checkpoint"
    assert newest[-1] >= 100


def test_checkpoint_that_a_job_resumed_from_stays(tmp_path: Path) -> None:
    first = Cluster(tmp_path, keep=1)
    first.save(10)
    first.upload(0, 1)
    resumed = Cluster(tmp_path, keep=1, resumed=10)
    for step in range(20, 80, 10):
        resumed.save(step)
        # Nothing reaches S3 any more, and deletions still do.
        for node in range(NODES):
            resumed.uploads[node].delete_removed()
        assert resumed.stored() == [10]
    assert resumed.logged()[-1] == (70, 10)


def test_folder_that_all_nodes_share_is_the_storage(tmp_path: Path) -> None:
    stored = StoredSteps(tmp_path, uploads=False)
    assert stored.own_uploads() is None
    stored.committed(10, [None, None])
    assert (stored.newest, stored.protected) == (10, frozenset({10}))


def test_checkpoint_that_a_rank_could_not_write_is_complete_nowhere(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, keep=2)
    cluster.save(10)
    # The second rank cannot give its file this name.
    (cluster.folders[1] / "step-00000020" / "tensors-00001.safetensors").mkdir(parents=True)
    cluster.save(20)
    for folder in cluster.folders:
        assert [path.parent.name for path in folder.rglob("complete.json")] == ["step-00000010"]
    events = list(parse_events(cluster.log.getvalue().splitlines()))
    [warning] = [event for event in events if event.get("code") == "checkpoint-failed"]
    assert warning["message"].startswith("no checkpoint at step 20: IsADirectoryError")
    cluster.save(30)
    assert cluster.logged() == [(10, None), (30, None)]
