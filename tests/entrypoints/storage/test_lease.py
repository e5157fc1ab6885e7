"""Exactly one of several processes holds a lease, in S3 and in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.storage import lease as holders
from sm_train.entrypoints.storage import lease as leases
from sm_train.entrypoints.storage.lease import Holder, Lease, LeaseHeldError, Renewal, read_lease
from sm_train.entrypoints.storage.lease_files import LeaseFiles, LocalLeaseFiles, S3LeaseFiles
from sm_train.entrypoints.storage.store import S3Access, open_store

from tests.support.deadline import DEADLINE

NAME = "state/lease.json"


@pytest.fixture(params=["folder", "s3", "s3, lost answers"])
def files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> LeaseFiles:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    if request.param == "folder":
        return LocalLeaseFiles(tmp_path / "packed")
    aws = request.getfixturevalue("aws")
    for name, value in aws.environment.items():
        monkeypatch.setenv(name, value)
    aws.make_bucket("packed")
    aws.loses_conditional_writes = request.param != "s3"
    return S3LeaseFiles(open_store(S3Access(None, "us-east-1")), "packed", "set/")


def elsewhere() -> Holder:
    """Return a process of another machine, which has no file on this one."""
    holder = Holder.of_this_process()
    holder.close()
    return replace(holder, host="another-computer")


def token(files: LeaseFiles) -> str:
    stored = read_lease(files, NAME)
    assert stored is not None
    return stored.holder.token


def test_exactly_one_of_many_gets_the_lease(files: LeaseFiles) -> None:
    barrier, won = threading.Barrier(8, timeout=DEADLINE), list[str]()

    def start() -> None:
        lease = Lease(files, NAME, elsewhere())
        barrier.wait()
        try:
            lease.acquire()
        except LeaseHeldError:
            return
        won.append(lease.holder.token)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [token(files)]


def test_lease_is_held_until_it_is_released_or_expires(
    files: LeaseFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Lease(files, NAME, elsewhere()), Lease(files, NAME, elsewhere())
    first.acquire()
    with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} on another-computer"):
        second.acquire()
    second.release()  # is not the holder
    assert token(files) == first.holder.token
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", -1.0)
    second.acquire()
    first.release()
    assert token(files) == second.holder.token
    assert not first.renew(), "it was taken over"
    second.release()
    assert read_lease(files, NAME) is None


def test_exactly_one_takes_over_an_expired_lease(
    files: LeaseFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lease(files, NAME, elsewhere()).acquire()
    stored = read_lease(files, NAME)
    taken = [Lease(files, NAME, elsewhere()).take(stored) for _ in range(3)]
    assert taken == [True, False, False]


HOLDING = """
import sys, time
from pathlib import Path
from typing import Any
from sm_train.entrypoints.storage.lease import Holder
from sm_train.entrypoints.storage.lease import Lease
from sm_train.entrypoints.storage.lease_files import LocalLeaseFiles
Lease(LocalLeaseFiles(Path(sys.argv[1])), sys.argv[2], Holder.of_this_process()).acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_lease_of_a_killed_process_is_free_at_once_on_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    files = LocalLeaseFiles(tmp_path)
    command = [sys.executable, "-c", HOLDING, str(tmp_path), NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        other = Lease(files, NAME, Holder.of_this_process())
        with pytest.raises(LeaseHeldError, match=f"process {process.pid} on"):
            other.acquire()
        process.send_signal(signal.SIGKILL)
    other.acquire()
    assert token(files) == other.holder.token


def test_holder_that_let_go_counts_as_ended_only_if_its_work_is_not_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    running, settled, unsettled = (Holder.of_this_process() for _ in range(3))
    settled.close()
    unsettled.close(settled=False)
    assert [holder.has_ended for holder in (running, settled, unsettled)] == [False, False, True]
    running.close()


def test_held_leases_are_renewed_and_lost_ones_dropped(
    files: LeaseFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    kept, lost = (Lease(files, f"{name}.json", elsewhere()) for name in ("kept", "lost"))
    renewal = Renewal()
    for name, lease in (("kept", kept), ("lost", lost)):
        lease.acquire()
        renewal.add(name, lease)
    Lease(files, "lost.json", elsewhere()).acquire(by_force=True)
    renewed, renew = threading.Event(), Lease.renew

    def observed(lease: Lease) -> bool:
        is_held = renew(lease)
        if lease is kept and is_held:
            renewed.set()
        return is_held

    monkeypatch.setattr(Lease, "renew", observed)
    with renewal:
        assert renewed.wait(DEADLINE)
        while "lost" in renewal:
            renewed.clear()
            assert renewed.wait(DEADLINE)
        assert "kept" in renewal


def test_lease_of_a_job_is_held_while_it_runs(
    files: LeaseFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lease(files, NAME, Holder.of_job("pack-1")).acquire()
    other = Lease(files, NAME, elsewhere())
    with pytest.raises(LeaseHeldError, match="the processing job pack-1"):
        other.acquire()  # the job is about to be created
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", -1.0)
    with pytest.raises(LeaseHeldError, match="the processing job pack-1"):
        other.acquire(job_is_active=lambda job: job == "pack-1")
    other.acquire()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"holder": {"name": "x"}}', b"\xff"])
def test_a_damaged_lease_is_an_error(files: LeaseFiles, content: bytes) -> None:
    assert files.write_if(NAME, content, version=None) is not None
    with pytest.raises(ValueError):
        read_lease(files, NAME)


def test_a_folder_holds_nothing_but_the_lease(tmp_path: Path) -> None:
    files = LocalLeaseFiles(tmp_path)
    version = files.write_if(NAME, b"a", version=None)
    assert files.write_if(NAME, b"b", version=None) is None
    assert files.write_if(NAME, b"b", version="another") is None
    assert files.write_if(NAME, b"c", version=version) is not None
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["lease.json"]
    files.remove(NAME)
    assert files.write_if(NAME, b"d", version=version) is None


@pytest.mark.parametrize("call", ["link", "replace"])
def test_write_that_nfs_carried_out_and_refused_in_a_repetition_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """An answer that NFS loses is followed by that of the repeated request: EEXIST or ENOENT."""
    files, original = LocalLeaseFiles(tmp_path), getattr(os, call)
    version = files.write_if(NAME, b"0", version=None) if call == "replace" else None

    def lose_answer(source: Path, target: Path) -> None:
        original(source, target)
        original(source, target)

    monkeypatch.setattr(os, call, lose_answer)
    written = files.write_if(NAME, b"1", version=version)
    found = files.read(NAME)
    assert found is not None
    assert (found.content, found.version) == (b"1", written)
    assert files.write_if(NAME, b"2", version=None) is None
    assert files.write_if(NAME, b"2", version="other") is None


def age(folder: Path, seconds: float) -> None:
    """Make the lease in a folder older."""
    path = folder / NAME
    written = path.stat().st_mtime - seconds
    os.utime(path, (written, written))


def test_a_lease_that_is_not_renewed_may_be_taken_after_two_minutes(tmp_path: Path) -> None:
    """A holder renews it every 20 seconds; a takeover before would meet one that still works."""
    files = LocalLeaseFiles(tmp_path)
    Lease(files, NAME, elsewhere()).acquire()
    second = Lease(files, NAME, elsewhere())
    age(tmp_path, 115)
    with pytest.raises(LeaseHeldError):
        second.acquire()
    age(tmp_path, 6)
    second.acquire()
    assert token(files) == second.holder.token


def test_a_lease_is_stored_with_its_document(files: LeaseFiles) -> None:
    lease = Lease(files, NAME, elsewhere(), {"placement": 2})
    lease.acquire()
    assert lease.renew()
    stored = read_lease(files, NAME)
    assert stored is not None
    assert stored.document == {"placement": 2}


class Contended(LocalLeaseFiles):
    """A folder in which another process takes and releases the lease at the first write."""

    def write_if(self, name: str, content: Any, *, version: str | None) -> str | None:
        if self.folder.exists():
            return super().write_if(name, content, version=version)
        other = Lease(LocalLeaseFiles(self.folder), name, elsewhere())
        other.acquire()
        written = super().write_if(name, content, version=version)
        other.release()
        return written


def test_a_lease_that_another_process_had_for_a_moment_is_taken(tmp_path: Path) -> None:
    files = Contended(tmp_path / "packed")
    lease = Lease(files, NAME, elsewhere())
    lease.acquire()
    assert token(files) == lease.holder.token


def test_files_of_holders_are_kept_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a lock shows other processes of this machine that its holder has ended."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    recent, old = Holder.of_this_process(), Holder.of_this_process()
    for holder, hours in ((recent, 23), (old, 25)):
        holder.close(settled=False)
        [path] = tmp_path.rglob(holder.token)
        written = path.stat().st_mtime - hours * 3600
        os.utime(path, (written, written))
    Holder.of_this_process().close()
    assert recent.has_ended
    assert not old.has_ended  # nothing is known of it: its leases expire


def test_a_holder_without_a_lock_never_counts_as_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder cannot be listed, so nobody notices its end; others wait for its lease."""

    def refused(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(holders, "_remove_old", refused)
    holder = Holder.of_this_process()
    assert not holder.has_ended
    holder.close()
