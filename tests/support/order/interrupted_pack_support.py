"""Helpers of the tests of interrupted pack, which other tests use as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import clean_environment
from tests.support.deadline import DEADLINE

PROGRAM = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"


# The parent of the tests (nohup, a shell) may ignore these signals, and children inherit that.
PROGRAM_WITH_SIGNALS = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n" + PROGRAM
)


@contextmanager
def started(
    folder: Path, *arguments: str, program: str = PROGRAM_WITH_SIGNALS
) -> Iterator[subprocess.Popen[str]]:
    """Run ``sm-train pack`` in its own process group, as a terminal does."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, "pack", "in", "out", "--shard-size", "100KB", *arguments],
        cwd=folder,
        env=clean_environment(folder),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if not group_is_gone(process.pid):  # the test failed
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until ``condition`` holds; ``process`` must keep running."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


def wait_for_group(leader: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while not group_is_gone(leader):
        assert time.monotonic() < deadline, "a process outlived the command"
        time.sleep(0.01)


def count_tar_files(folder: Path) -> int:
    """Count the tars and their records while a packer may add and remove folders."""
    return sum(".tar" in name for _, _, names in os.walk(folder) for name in names)
