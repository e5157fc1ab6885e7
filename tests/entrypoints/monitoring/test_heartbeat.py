"""Folders of heartbeats, and the processes that left them."""

from __future__ import annotations

import multiprocessing
import os
import random
import stat
import subprocess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from sm_train.entrypoints.monitoring import procfs
from sm_train.entrypoints.monitoring.heartbeat import (
    ExitState,
    HeartbeatReader,
    HeartbeatWriter,
    Phase,
    _Record,
    create_private_folder,
    stale_dirs,
)

RECORD_BYTES, BUSY_BYTES = slice(0, 48), slice(88, 128)
"""Where the records of the phase and of busy times lie in the memory."""


def _beat(path: Path, started: Event, stop: Event) -> None:
    """Enter phases and add busy times as fast as possible: all fields are functions of the step."""
    step = 0
    writer = HeartbeatWriter(path, rank=3, local_rank=0, clock=lambda: step * 1000)
    started.set()
    while not stop.is_set():
        for _ in range(200):
            step += 1
            writer.enter(Phase.DATA if step % 2 else Phase.STEP, step)
            writer.add_busy(7, 5)


def test_reader_at_full_speed_sees_only_records_that_were_written(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started, stop = context.Event(), context.Event()
    path = tmp_path / "heartbeat-0"
    process = context.Process(target=_beat, args=(path, started, stop))
    process.start()
    try:
        assert started.wait(60)
        reader, last, last_busy, valid = HeartbeatReader(path), 0, 0, 0
        while valid < 30_000:
            if (sample := reader.sample()) is not None and sample.sequence:
                valid += 1
                assert sample.sequence == sample.step >= last
                assert sample.since == pytest.approx(sample.step * 1e-6)
                expected = Phase.DATA if sample.step % 2 else Phase.STEP
                assert sample.phase in (expected, Phase.FIRST_STEP)
                assert sample.rank == 3
                last = sample.sequence
            if (busy := reader.busy()) is not None:
                steps, seconds, waits = busy
                assert (steps * 7 / 1e9, steps * 5 / 1e9) == (seconds, waits)
                assert steps >= last_busy
                last_busy = steps
    finally:
        stop.set()
        process.join(60)


def test_record_with_any_changed_bit_is_no_valid_record(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat-0"
    writer = HeartbeatWriter(path, rank=0, local_rank=0)
    writer.enter(Phase.STEP, 41)
    writer.add_busy(7, 5)
    writer.end(ExitState.DONE)
    whole = path.read_bytes()
    rng = random.Random(0)
    for place, read in ((RECORD_BYTES, HeartbeatReader.sample), (BUSY_BYTES, HeartbeatReader.busy)):
        assert read(HeartbeatReader(path)) is not None
        for _ in range(60):
            content = bytearray(whole)
            content[rng.randrange(place.start, place.stop)] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            assert read(HeartbeatReader(path)) is None
        # Stores that became visible in another order: some words are still those of before.
        content = bytearray(whole)
        content[place] = bytes(place.stop - place.start)
        path.write_bytes(content)
        assert read(HeartbeatReader(path)) is None
        # The process and its end are known without a record.
        assert HeartbeatReader(path).exit_state is ExitState.DONE
        path.write_bytes(whole)


def test_launcher_of_a_system_without_proc_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS: the folder of a launcher that lives must not be removed."""
    monkeypatch.setattr(procfs, "_PROC", tmp_path / "proc")
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert procfs.state(os.getpid()) == procfs.UNKNOWN
    assert procfs.state(ended.pid) == "X"
    for pid in (os.getpid(), ended.pid):
        (tmp_path / f"sm-train-{os.getuid()}-{pid}-0").mkdir(mode=0o700)
    assert stale_dirs(tmp_path / "sm-train-x") == [
        tmp_path / f"sm-train-{os.getuid()}-{ended.pid}-0"
    ]


class Torn(bytearray):
    """Shared memory in which the first reads meet a record that is being written."""

    torn = 5

    def __getitem__(self, place: object) -> bytes:  # type: ignore[override]
        content = bytes(super().__getitem__(place))  # type: ignore[index]
        self.torn -= 1
        return content if self.torn < 0 else bytes(len(content) - 1) + b"x"


def test_a_record_that_is_being_written_is_read_again() -> None:
    memory = Torn(64)
    record = _Record(memory, 0, 2)  # type: ignore[arg-type]
    record.write(3, 40, 50)
    assert record.read() == (3, 40, 50)
    memory.torn = 10_000
    assert record.read() is None  # its writer has died meanwhile


def test_the_folder_of_heartbeats_is_that_of_the_user_alone(tmp_path: Path) -> None:
    create_private_folder(tmp_path / "rank")
    assert stat.S_IMODE((tmp_path / "rank").stat().st_mode) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="is not a private folder of this user"):
        create_private_folder(tmp_path / "open")
