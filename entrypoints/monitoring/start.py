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
from collections.abc import Iterator
from pathlib import Path

from sm_train.entrypoints.monitoring.heartbeat import (
    ExitState,
    HeartbeatWriter,
    heartbeat_file,
    heartbeat_folder,
    stacks_file,
    stale_dirs,
)
from sm_train.entrypoints.monitoring.stack_dump import register_stack_dump

_EXIT_TIMEOUT = 30.0
"""Seconds in which the watchdog of a job that ended well sends its last alerts."""


@contextlib.contextmanager
def heartbeat(document: Path, stage: str) -> Iterator[HeartbeatWriter]:
    """Write this process's heartbeats, watched by the node's watchdog, until the block ends.

    The watchdog reads the job configuration at ``document`` itself.
    """
    folder, local_rank = heartbeat_folder(), int(os.environ.get("LOCAL_RANK", "0"))
    for stale in stale_dirs(folder):
        shutil.rmtree(stale, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    # Before the heartbeat is visible: without its handler the signal would end this process.
    register_stack_dump(stacks_file(folder, local_rank))
    rank = int(os.environ.get("RANK", "0"))
    writer = HeartbeatWriter(heartbeat_file(folder, local_rank), rank=rank, local_rank=local_rank)
    watchdog = None
    if local_rank == 0:
        try:
            watchdog = _WatchdogProcess(document, stage, folder)
        except OSError as error:
            print(f"warning: this node has no watchdog: {error}", flush=True)
    try:
        yield writer
    except BaseException:
        writer.end(ExitState.FAILED)
        raise
    writer.end(ExitState.DONE)
    if watchdog is not None:
        watchdog.finish()


class _WatchdogProcess:
    """The watchdog's process, restarted if something kills it.

    Its standard input closes when this process ends, however that happens.
    """

    def __init__(self, document: Path, stage: str, folder: Path) -> None:
        # This process found the bundle by its script's folder; the watchdog needs it in its path.
        bundle = str(Path(__file__).resolve().parents[3])
        paths = [bundle, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._command = [sys.executable, "-m", "sm_train.entrypoints.monitoring.watchdog"]
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
        """Let the watchdog end; kill it if it hangs, because the job has ended well."""
        self._finished = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
