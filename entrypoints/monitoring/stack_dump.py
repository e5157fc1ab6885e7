"""What a process's threads stand in: by py-spy where it may look, else by the process's own word.

py-spy reads another process's memory, so it also sees one that is stopped. Otherwise a signal
makes the process write its stacks itself: faulthandler's handler is C and needs no GIL.
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

_LOOK_SECONDS, _ANSWER_SECONDS = 10.0, 3.0
_LOOKS = 3
"""At a process that goes on meanwhile: what is read of its memory may not fit together."""

_PR_SET_PTRACER, _ANYBODY = 0x59616D61, -1

# Frames of a thread, innermost first, as py-spy and as faulthandler write them.
_PY_SPY = re.compile(r"^ +(?P<function>\S+) \((?P<file>.+?)(?::\d+)?\)$")
_FAULTHANDLER = re.compile(r'^  File "(?P<file>.+)", line \d+ in (?P<function>\S+)$')

_INNERMOST = 6


def answer_signal(path: Path) -> None:
    """Write all stacks to ``path`` whenever this process gets :data:`SIGNAL`.

    Also lets others of this user look into it, where Yama allows that to parents only.
    """
    file = path.open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANYBODY), 0, 0, 0)


def stacks(pid: int, answer: Path | None, *, seconds: float = _LOOK_SECONDS) -> str:
    """The process's stacks as text, or why there are none.

    ``answer`` is where the process writes them itself, for one that called
    :func:`answer_signal`. Takes no longer than ``seconds`` and three more.
    """
    text = _py_spy(pid, seconds)
    if not text and answer is not None:
        text = _ask(pid, answer)
    return text or f"no stacks of process {pid}: py-spy may not look, and it does not answer\n"


def _py_spy(pid: int, seconds: float) -> str:
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        return ""
    # Pausing a process for the look would wait for one that is stopped already.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    deadline = time.monotonic() + seconds
    for _ in range(_LOOKS):
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


def _ask(pid: int, answer: Path) -> str:
    try:
        before = answer.stat().st_size
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    size, deadline = before, time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = answer.stat().st_size
        if now > before and now == size:
            break
        size = now
    with answer.open(errors="replace") as file:
        file.seek(before)
        return file.read()


def waits_in_collective(text: str) -> bool | None:
    """Whether the main thread of a process with these stacks waits for other processes.

    The innermost frames tell: of ``torch.distributed``, or the backward pass, in which DDP and
    FSDP sum gradients. None where there are no frames.
    """
    frames = _main_thread(text)[:_INNERMOST]
    if not frames:
        return None
    return any(
        "torch/distributed/" in file or function == "_engine_run_backward"
        for function, file in frames
    )


def _main_thread(text: str) -> list[tuple[str, str]]:
    """(function, file) of the main thread's frames: named so by py-spy, last in faulthandler's."""
    threads = re.split(r"^(?=(?:Current thread|Thread) )", text, flags=re.MULTILINE)[1:]
    named = [one for one in threads if '"MainThread"' in one.partition("\n")[0]]
    chosen = named[0] if named else threads[-1] if threads else ""
    matches = (_PY_SPY.match(line) or _FAULTHANDLER.match(line) for line in chosen.splitlines())
    return [(found["function"], found["file"]) for found in matches if found]
