"""A bucket behind FUSE that stops responding in the middle of a loader worker's read."""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.capabilities import require_fuse
from tests.support.cluster.stalls_support import STALL_TIMEOUT, WatchedJob
from tests.support.deadline import DEADLINE
from tests.support.s3_mount import Fault, mount_bucket, serve_bucket

pytestmark = pytest.mark.integration


def test_worker_stuck_in_a_fuse_read_is_blamed_and_the_job_ends(tmp_path: Path) -> None:
    """SIGKILL does not end a worker that waits for its file system: the job ends without it."""
    require_fuse()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard.tar").write_bytes(bytes(2**20))
    (tmp_path / "job").mkdir()
    with serve_bucket() as bucket:
        bucket.upload(tmp_path / "data")
        # Unmounting waits for outstanding requests.
        with mount_bucket(bucket.url, tmp_path / "mount") as folder, ExitStack() as release:
            bucket.fault = Fault(seconds=1000)
            release.callback(bucket.fault.released.set)
            path = str(folder / "shard.tar")
            with WatchedJob(tmp_path / "job", ["read"], "kill", {"READ": path}) as watched:
                stall = watched.wait_for(code="stall", kind="warning")
                assert stall["phase"] == "data"
                assert stall["silent_seconds"] >= STALL_TIMEOUT
                assert (stall["blamed_rank"], stall["blamed_node"]) == (0, 0)
                stacks = watched.report_text(stall, "workers.txt")
                assert "read_forever" in stacks
                [worker] = re.findall(r"^Process (\d+): .*spawn_main", stacks, re.MULTILINE)
                worker_state = watched.report_text(stall, "system.txt").partition(
                    f"process {worker}: "
                )[2]
                # Kernels differ: it waits in the page cache or in FUSE.
                assert re.search("folio_wait|request_wait", worker_state.partition("\n\n")[0])
                assert watched.wait_for(kind="error")["code"] == "stall"
                assert watched.processes[0].wait(timeout=DEADLINE) == -signal.SIGKILL
                assert "no heartbeat for" in (tmp_path / "job" / "output" / "failure").read_text()
                # No response was sent so far. Once it is, the worker exits and closes the output.
                assert bucket.gets
                assert all(get.sent == 0 for get in bucket.gets)
                release.close()
                list(watched.lines())
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(int(worker)).wait(timeout=DEADLINE)
