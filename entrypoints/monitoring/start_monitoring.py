"""Starts a training process's heartbeat and its node's watchdog.

The watchdog is a process of its own, so it keeps running while a training process hangs in a
collective, in a read, or in a call that holds the GIL. A node's first training process starts it;
it reads the heartbeats of all of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sm_train.entrypoints.monitoring.heartbeat import (
    ExitState,
    HeartbeatWriter,
    create_private_folder,
    error_file,
    heartbeat_file,
    heartbeat_folder,
    launched_folders,
    stacks_file,
    stale_dirs,
)
from sm_train.entrypoints.monitoring.stack_dump import register_stack_dump

_EXIT_TIMEOUT = 30.0
"""Seconds in which the watchdog sends its last alerts when training has ended."""


@contextlib.contextmanager
def watchdog(document: Path, stage: str) -> Iterator[None]:
    """Watch this node's heartbeats until the block ends, then wait for the last alerts.

    The node's first process starts the watchdog, which reads the job configuration at ``document``
    itself.
    """
    folder = heartbeat_folder()
    for stale in stale_dirs(folder):
        shutil.rmtree(stale, ignore_errors=True)
    create_private_folder(folder)
    process = None
    if _local_rank() == 0:
        try:
            process = _WatchdogProcess(document, stage, folder)
        except OSError as error:
            print(f"warning: this node has no watchdog: {error}", flush=True)
    try:
        yield
    finally:
        if process is not None:
            process.finish()


@contextlib.contextmanager
def heartbeat() -> Iterator[HeartbeatWriter]:
    """Write this process's heartbeats until the block ends, and how it ends."""
    folder, local_rank = heartbeat_folder(), _local_rank()
    # Before the heartbeat is visible: without its handler the signal would end this process.
    register_stack_dump(stacks_file(folder, local_rank))
    rank = int(os.environ.get("RANK", "0"))
    writer = HeartbeatWriter(heartbeat_file(folder, local_rank), rank=rank, local_rank=local_rank)
    try:
        yield writer
    except BaseException as error:
        with contextlib.suppress(OSError):
            error_file(folder, local_rank).write_text(f"{type(error).__name__}: {error}")
        writer.end(ExitState.FAILED)
        raise
    writer.end(ExitState.DONE)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def wait_for_watchdog(launcher: int) -> None:
    """Wait until the watchdog of a launcher's processes has sent its last alerts.

    A container ends with its first process, so the launcher's parent waits for an orphaned
    watchdog: the process that started it may have been killed.
    """
    deadline = time.monotonic() + _EXIT_TIMEOUT
    while launched_folders(launcher) and time.monotonic() < deadline:
        time.sleep(0.1)


class _WatchdogProcess:
    """The watchdog's process, restarted if something kills it.

    Its standard input closes when this process ends, however that happens.
    """

    def __init__(self, document: Path, stage: str, folder: Path) -> None:
        # This process found the bundle by its script's folder; the watchdog needs it in its path.
        bundle = str(Path(__file__).resolve().parents[3])
        paths = [bundle, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._command = [sys.executable, "-m", "sm_train.entrypoints.monitoring.watchdog.watchdog"]
        self._command += ["--document", str(document), "--stage", stage]
        self._command += ["--heartbeats", str(folder)]
        self._finished = False
        self._process = self._start()
        threading.Thread(target=self._restart_if_killed, name="watchdog", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, env=self._environment)

    def _restart_if_killed(self) -> None:
        while self._process.wait() < 0 and not self._finished:
            print("warning: the watchdog was killed; restarting it", flush=True)
            self._process = self._start()

    def finish(self) -> None:
        """Let the watchdog end, which sends its last alerts; kill it if it hangs."""
        self._finished = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
