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
from collections.abc import Iterator
from pathlib import Path

from sm_train.entrypoints.pulse import (
    Ending,
    Pulse,
    abandoned,
    pulse_file,
    pulse_folder,
    stacks_file,
)
from sm_train.entrypoints.stacks import answer_signal

_PATIENCE = 30.0
"""Seconds in which a monitor whose job has ended well sends its last alerts."""


@contextlib.contextmanager
def heartbeat(document: Path, stage: str) -> Iterator[Pulse]:
    """This process's pulse, watched until the block ends.

    ``document`` is the run document, which the monitor reads for itself.
    """
    folder, local_rank = pulse_folder(), int(os.environ.get("LOCAL_RANK", "0"))
    for left in abandoned(folder):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    # Before the pulse is there to be found: the signal would end this process.
    answer_signal(stacks_file(folder, local_rank))
    rank = int(os.environ.get("RANK", "0"))
    pulse = Pulse(pulse_file(folder, local_rank), rank=rank, local_rank=local_rank)
    monitor = None if local_rank else _start_monitor(document, stage, folder)
    try:
        yield pulse
    except BaseException:
        pulse.end(Ending.FAILED)
        raise
    pulse.end(Ending.DONE)
    if monitor is not None:
        _await_end(monitor)


def _start_monitor(document: Path, stage: str, folder: Path) -> subprocess.Popen[bytes] | None:
    """The monitor; its standard input ends when this process does, however that ends."""
    # The bundle is found by the folder of the script, which another process does not share.
    above = str(Path(__file__).resolve().parents[2])
    paths = [above, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "sm_train.entrypoints.monitor"]
    command += ["--document", str(document), "--stage", stage, "--pulses", str(folder)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except OSError as error:
        print(f"warning: nobody watches this machine: {error}", flush=True)
        return None


def _await_end(monitor: subprocess.Popen[bytes]) -> None:
    """It leaves by itself; a job that has ended well does not wait for one that cannot."""
    assert monitor.stdin is not None
    monitor.stdin.close()
    try:
        monitor.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        monitor.kill()
