"""Reads the stacks of another process's threads: with py-spy if possible, else by a signal.

py-spy reads the process's memory, so it also works on a stopped one. Otherwise a signal makes the
process write its stacks itself: faulthandler's handler is C and needs no GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SIGNAL = signal.SIGUSR2

_PY_SPY_SECONDS, _SIGNAL_SECONDS = 10.0, 3.0
_PY_SPY_ATTEMPTS = 3
"""py-spy reads a running process's memory without pausing it, which can be inconsistent."""

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, -1

# A frame of a thread, as py-spy ("    wait (threading.py:327)") and as faulthandler write it
# ('  File "/usr/lib/python3.11/threading.py", line 327 in wait'); the innermost comes first.
_PY_SPY = re.compile(r"^ +(?P<function>\S+) \((?P<file>.+?)(?::\d+)?\)$")
_FAULTHANDLER = re.compile(r'^  File "(?P<file>.+)", line \d+ in (?P<function>\S+)$')

_INNERMOST_FRAMES = 6


def register_stack_dump(path: Path) -> None:
    """Write all stacks to ``path`` whenever this process receives :data:`SIGNAL`.

    Also lets the user's other processes read its memory, which Yama otherwise allows only to its
    ancestors.
    """
    file = path.open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)


def stacks(pid: int, dump: Path | None, *, seconds: float = _PY_SPY_SECONDS) -> str:
    """Return the process's stacks as text, or why there are none.

    ``dump`` is the file of a process that called :func:`register_stack_dump`. Takes at most
    ``seconds`` and three more.
    """
    text = _py_spy(pid, seconds)
    if not text and dump is not None:
        text = _dump_by_signal(pid, dump)
    return text or (
        f"no stacks of process {pid}: py-spy cannot read it, and it does not react to a signal\n"
    )


def _py_spy(pid: int, seconds: float) -> str:
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        return ""
    # Without --nonblocking, py-spy would wait forever for a process that is stopped already.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    deadline = time.monotonic() + seconds
    for _ in range(_PY_SPY_ATTEMPTS):
        try:
            run = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(0.0, deadline - time.monotonic()),
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if run.returncode == 0 and "Thread" in run.stdout:
            return run.stdout
    return ""


def _dump_by_signal(pid: int, dump: Path) -> str:
    try:
        before = dump.stat().st_size
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    size, deadline = before, time.monotonic() + _SIGNAL_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = dump.stat().st_size
        # It is complete once it has grown and stopped growing.
        if now > before and now == size:
            break
        size = now
    with dump.open(errors="replace") as file:
        file.seek(before)
        return file.read()


def waits_in_collective(text: str) -> bool | None:
    """Return whether the main thread in these stacks waits for other ranks; None without frames.

    It does if one of its innermost frames is in ``torch.distributed``, or is the backward pass, in
    which DDP and FSDP reduce gradients.
    """
    frames = _main_thread_frames(text)[:_INNERMOST_FRAMES]
    if not frames:
        return None
    return any(
        "torch/distributed/" in file or function == "_engine_run_backward"
        for function, file in frames
    )


def _main_thread_frames(text: str) -> list[tuple[str, str]]:
    """Return (function, file) of the main thread's frames.

    py-spy names it "MainThread"; faulthandler prints it last.
    """
    threads = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.MULTILINE)[1:]
    named = [thread for thread in threads if '"MainThread"' in thread.partition("\n")[0]]
    chosen = named[0] if named else threads[-1] if threads else ""
    matches = (_PY_SPY.match(line) or _FAULTHANDLER.match(line) for line in chosen.splitlines())
    return [(found["function"], found["file"]) for found in matches if found]
