"""Nodes of a processing job that are killed, paused, late or restarted write the same pack."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.data_prep.work import work_stages
from sm_train.entrypoints.data_prep.work.work_stages import (
    PLAN_NAME,
    Part,
    SharedWork,
    Stage,
    WorkLeases,
)
from sm_train.entrypoints.data_prep.work.worker_pool import WorkProgress
from sm_train.entrypoints.storage import lease
from sm_train.entrypoints.storage.storage import S3Prefix
from sm_train.entrypoints.storage.store import S3Access

from tests.conftest import Aws, Cli
from tests.support.deadline import DEADLINE
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair
from tests.support.moto_server import ACCOUNT
from tests.support.run_files import write_run
from tests.toolkit.data_prep.packing.on_sagemaker_support import start_node
from tests.toolkit.data_prep.packing.pack_options_support import (
    read_objects,
    upload_folder,
    without_root,
)

PACK = ("pack", "s3://raw/photos/", "s3://packed/set", "--near-duplicates", "3")
SIZE = ("--shard-size", "10KB")
EXPIRES = 3.0


class Job:
    """A started processing job of two nodes, and the pack that a single process writes."""

    def __init__(self, folder: Path, aws: Aws, expected: dict[str, bytes]) -> None:
        self.folder, self.aws, self.expected = folder, aws, expected
        [self._body] = aws.bodies("CreateProcessingJob")
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int) -> subprocess.Popen[str]:
        """Start a node whose claims expire soon."""
        folder = self.folder / f"start-{len(self._processes)}"
        folder.mkdir()
        process = start_node(folder, self.aws, self._body, rank, expires=EXPIRES)
        self._processes.append(process)
        return process

    def wait_for_shards(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE
        while sum("/shards/" in f"/{name}" for name in self.stored()) < count:
            assert time.monotonic() < deadline, self.stored().keys()
            time.sleep(0.05)

    def stored(self) -> dict[str, bytes]:
        return read_objects(self.aws, "packed", "set/")

    def require_end(self, process: subprocess.Popen[str]) -> str:
        log, _ = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, log
        return log

    def kill_all(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=DEADLINE)


@pytest.fixture
def job(cli: Cli, aws: Aws, tmp_path: Path) -> Iterator[Job]:
    write_album(tmp_path / "in", 24)
    write_pair(tmp_path / "in", "cut.jpg", image_bytes()[:300], "x")
    write_pair(tmp_path / "in", "twin.jpg", image_bytes(3), "a duplicate")
    upload_folder(aws, tmp_path / "in", "photos/")
    aws.make_bucket("packed")
    aws.make_bucket("ai-bucket")
    run = write_run(tmp_path, bucket="ai-bucket", role=f"arn:aws:iam::{ACCOUNT}:role/own")
    on = ("--on", "sagemaker", "--for", run, "--instances", "2", "--yes")
    environment = {"network": "loopback", "env": aws.environment, "timeout": DEADLINE}
    sent = cli("--region", "us-east-1", *PACK, *SIZE, *on, **environment)
    assert sent.returncode == 0, sent.stderr
    alone = cli("pack", "in", "out", *PACK[3:], *SIZE, "--for", run, timeout=DEADLINE)
    assert alone.returncode == 0, alone.stderr
    expected = {name: text for name, text in read_tree(tmp_path / "out").items() if "." in name}
    started = Job(tmp_path, aws, without_root(expected))
    yield started
    started.kill_all()


def kill(job: Job) -> None:
    """One of two nodes is killed in the middle."""
    lost, other = job.start(0), job.start(1)
    job.wait_for_shards(1)
    os.killpg(lost.pid, signal.SIGKILL)
    job.require_end(other)


def pause(job: Job) -> None:
    """One of two nodes is paused until the other has finished the pack."""
    paused, other = job.start(0), job.start(1)
    job.wait_for_shards(1)
    os.killpg(paused.pid, signal.SIGSTOP)
    try:
        job.require_end(other)
        assert without_root(job.stored()) == job.expected
    finally:
        os.killpg(paused.pid, signal.SIGCONT)
    job.require_end(paused)


def start_late(job: Job) -> None:
    """One node starts in the middle, another one after the end."""
    first = job.start(0)
    job.wait_for_shards(1)
    second = job.start(1)
    logs = job.require_end(first) + job.require_end(second) + job.require_end(job.start(1))
    assert logs.count("samples,") == 1


def restart(job: Job) -> None:
    """Both nodes are lost, and the job is started again."""
    lost = [job.start(rank) for rank in (0, 1)]
    job.wait_for_shards(1)
    for process in lost:
        os.killpg(process.pid, signal.SIGKILL)
    for process in [job.start(rank) for rank in (0, 1)]:
        job.require_end(process)


@pytest.mark.slow
@pytest.mark.parametrize("disturb", [kill, pause, start_late, restart])
def test_disturbed_nodes_write_the_pack_of_a_single_process(
    job: Job, disturb: Callable[[Job], None]
) -> None:
    disturb(job)
    assert without_root(job.stored()) == job.expected


@pytest.fixture
def prefix(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> S3Prefix:
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    aws.make_bucket("packed")
    found = S3Prefix("packed", "set/", S3Access(None, "us-east-1"))
    found.create_if_absent(PLAN_NAME, b"{}")
    monkeypatch.setattr(work_stages, "POLL_SECONDS", 0.0)
    return found


def counting_stage(parts: int, finished: list[str]) -> Stage[str]:
    """Return a stage whose items are finished by being appended to ``finished``."""

    def run(items: Any) -> Any:
        for item in items:
            finished.append(item)
            yield WorkProgress(1, 1, 0, 0)

    return Stage(
        [Part(f"part-{number}", [f"item-{number}"]) for number in range(parts)],
        lambda items: [item for item in items if item not in finished],
        run,
    )


def test_a_part_has_one_node_and_is_taken_over_when_its_lease_expires(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, other = WorkLeases(prefix.lease_files), WorkLeases(prefix.lease_files)
    assert lost.acquire("shards-0")
    assert lost.acquire("shards-0")
    assert not other.acquire("shards-0")
    monkeypatch.setattr(lease, "EXPIRES_SECONDS", -1.0)
    assert other.acquire("shards-0")


def test_a_node_whose_lease_was_taken_over_stops_renewing_it(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    paused, other = WorkLeases(prefix.lease_files), WorkLeases(prefix.lease_files)
    assert paused.acquire("shards-0")
    assert other.acquire("shards-0", by_force=True)
    with paused.renewed():
        deadline = time.monotonic() + DEADLINE
        while paused.acquire("shards-0"):
            assert time.monotonic() < deadline
    assert other.acquire("shards-0")


def test_a_lost_node_does_not_hold_up_the_others(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert WorkLeases(prefix.lease_files).acquire("part-1")
    finished: list[str] = []
    shared = SharedWork(prefix, node_rank=1, num_nodes=2, is_shared=True)
    progress = shared.complete(counting_stage(3, finished))
    assert [next(progress).done for _ in range(2)] == [1, 1]
    assert finished == ["item-2", "item-0"]  # starts with its own share; part 1 is held
    monkeypatch.setattr(lease, "EXPIRES_SECONDS", 0.0)
    list(progress)
    assert finished == ["item-2", "item-0", "item-1"]


def test_an_idle_node_takes_over_a_part_that_makes_no_progress(
    prefix: S3Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = WorkLeases(prefix.lease_files)
    assert slow.acquire("part-0")
    monkeypatch.setattr(work_stages, "SLOW_SECONDS", 0.01)
    finished: list[str] = []
    list(SharedWork(prefix, is_shared=True).complete(counting_stage(1, finished)))
    assert finished == ["item-0"]


@pytest.mark.parametrize("sign", ["ended", "removed"])
def test_a_node_ends_when_another_one_has_written_the_index(prefix: S3Prefix, sign: str) -> None:
    assert WorkLeases(prefix.lease_files).acquire("part-0")
    if sign == "ended":
        prefix.create_if_absent(work_stages.ENDED_NAME, b"")
    else:
        prefix.remove(PLAN_NAME)
    with pytest.raises(work_stages.WorkEndedError):
        list(SharedWork(prefix, is_shared=True).complete(counting_stage(1, [])))
