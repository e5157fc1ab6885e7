"""Reads the state of processes on this node from ``/proc``, which macOS does not have.

There a process's end is known, and nothing else of it: every other question has no answer.
"""

from __future__ import annotations

import os
from pathlib import Path

UNKNOWN = "?"
"""State of a process that exists, where nothing else is known."""

_PROC = Path("/proc")


def state(pid: int) -> str:
    """Return the process's state letter (R, S, D, T, Z …); X if there is no such process.

    :data:`UNKNOWN` without ``/proc``, for a process that exists.
    """
    if not _PROC.is_dir():
        return UNKNOWN if _exists(pid) else "X"
    try:
        return _stat_fields(pid)[0]
    except (OSError, IndexError):
        return "X"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def exit_code(pid: int) -> int | None:
    """Return the exit code of a process that its parent has not reaped; None once it has.

    The code is as in :mod:`subprocess`: negative for a signal.
    """
    try:
        # Field 52 of proc(5), in waitpid's format; the fields here begin with the third.
        return os.waitstatus_to_exitcode(int(_stat_fields(pid)[49]))
    except (OSError, IndexError, ValueError):
        return None


def descendants(pid: int) -> list[int]:
    """Return the children of ``pid``, their children and so on."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            parent = int(_stat_fields(int(folder.name))[1])
            children.setdefault(parent, []).append(int(folder.name))
        except (OSError, IndexError):
            continue
    result, generation = [], [pid]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, [])]
        result += generation
    return result


def describe(pid: int) -> str:
    """Return a paragraph: command, state, and where in the kernel the process waits."""
    lines = [f"process {pid}: {_read_text(pid, 'cmdline').replace(chr(0), ' ').strip()[:200]}"]
    for line in _read_text(pid, "status").splitlines():
        if line.startswith(("State:", "VmRSS:", "Threads:")):
            lines.append("  " + " ".join(line.split()))
    for name in ("wchan", "syscall", "stack"):
        if content := _read_text(pid, name).strip():
            lines += [f"  {name}: " + content.replace("\n", "\n    ")]
    return "\n".join(lines)


def read_bytes(pid: int) -> int:
    """Return the bytes that the process has read so far from any file system (``rchar``)."""
    for line in _read_text(pid, "io").splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    return 0


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on."""
    text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    # The second field is "(command)", and a command may contain spaces and brackets.
    return text.rpartition(")")[2].split()


def _read_text(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""
