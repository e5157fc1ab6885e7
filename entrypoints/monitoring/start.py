"""A training process under watch: its signs of life, and the monitor of its machine.

The monitor is a process of its own, so it goes on while a training process hangs in a collective,
in a read, or in a call that holds the GIL. The first training process of a machine starts it; it
reads the signs of all of them.
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
from sm_train.entrypoints.monitoring.stack_dump import answer_signal

_PATIENCE = 30.0
"""Seconds in which a monitor whose job has ended well sends its last alerts."""


@contextlib.contextmanager
def heartbeat(document: Path, stage: str) -> Iterator[HeartbeatWriter]:
    """This process's pulse, watched until the block ends.

    ``document`` is the run document, which the monitor reads for itself.
    """
    folder, local_rank = heartbeat_folder(), int(os.environ.get("LOCAL_RANK", "0"))
    for left in stale_dirs(folder):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    # Before the pulse is there to be found: the signal would end this process.
    answer_signal(stacks_file(folder, local_rank))
    rank = int(os.environ.get("RANK", "0"))
    pulse = HeartbeatWriter(heartbeat_file(folder, local_rank), rank=rank, local_rank=local_rank)
    monitor = None
    if local_rank == 0:
        try:
            monitor = _WatchdogProcess(document, stage, folder)
        except OSError as error:
            print(f"warning: nobody watches this machine: {error}", flush=True)
    try:
        yield pulse
    except BaseException:
        pulse.end(ExitState.FAILED)
        raise
    pulse.end(ExitState.DONE)
    if monitor is not None:
        monitor.finish()


class _WatchdogProcess:
    """The monitor's process, started again when something kills it.

    Its standard input ends when this process does, however that ends.
    """

    def __init__(self, document: Path, stage: str, folder: Path) -> None:
        # The bundle is found by the folder of the script, which another process does not share.
        above = str(Path(__file__).resolve().parents[3])
        paths = [above, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._command = [sys.executable, "-m", "sm_train.entrypoints.monitoring.watchdog"]
        self._command += ["--document", str(document), "--stage", stage, "--pulses", str(folder)]
        self._ended = False
        self._process = self._start()
        threading.Thread(target=self._keep, name="monitor", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, env=self._environment)

    def _keep(self) -> None:
        while self._process.wait() < 0 and not self._ended:
            print("warning: the monitor was killed; it is started again", flush=True)
            self._process = self._start()

    def finish(self) -> None:
        """It leaves by itself; a job that has ended well does not wait for one that cannot."""
        self._ended = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
