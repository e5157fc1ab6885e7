"""A bucket behind FUSE that stops answering in the middle of a loader worker's read."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from tests.cluster.test_stalls import LIMIT, Watched
from tests.container.required import require_fuse
from tests.container.s3_mount import Trouble, mounted, store


def kernel_stack(pid: int) -> str:
    """Where the process stands in the kernel, which root may read; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stack").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_worker_in_a_fuse_read_is_found_and_the_job_ends_without_it(tmp_path: Path) -> None:
    """Once its read has reached the file system even SIGKILL waits for the answer."""
    require_fuse()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard.tar").write_bytes(bytes(2**20))
    (tmp_path / "job").mkdir()
    with store() as bucket:
        bucket.put(tmp_path / "data")
        with mounted(bucket.url, tmp_path / "mount") as place:
            bucket.trouble = Trouble(seconds=1000)
            path = str(place / "shard.tar")
            with Watched(tmp_path / "job", ["read"], "end", {"READ": path}) as watched:
                stall = watched.wait_for(code="stall", kind="warning")
                family = psutil.Process(watched.processes[0].pid).children(recursive=True)
                [worker] = [one for one in family if "fuse" in kernel_stack(one.pid)]
                assert stall["section"] == "data"
                assert LIMIT <= stall["silent_seconds"] < 5 * LIMIT
                assert (stall["blamed_rank"], stall["blamed_node"]) == (0, 0)
                assert "read_for_ever" in watched.evidence(stall, "workers.txt")
                assert "fuse" in watched.evidence(stall, "machine.txt")
                assert watched.wait_for(kind="error")["code"] == "stall"
                assert watched.processes[0].wait(timeout=30) == -signal.SIGKILL
                assert "no sign for" in (tmp_path / "job" / "output" / "failure").read_text()
                # It ends with its parent, and cannot.
                deadline = time.monotonic() + 10
                while worker.status() != psutil.STATUS_DISK_SLEEP:
                    assert time.monotonic() < deadline, worker.status()
                    time.sleep(0.05)
        # Without its file system the read fails, and nothing is left.
        assert psutil.wait_procs(family, timeout=30)[1] == []
