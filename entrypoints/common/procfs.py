"""What the kernel says of processes on this machine, read from ``/proc``."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


def state(pid: int) -> str:
    """The process's state letter (R, S, D, T, Z …); X where there is no such process."""
    try:
        return _fields(pid)[0]
    except (OSError, IndexError):
        return "X"


def descendants(pid: int) -> list[int]:
    """The processes that ``pid`` has started, and theirs."""
    parents: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            parents.setdefault(int(_fields(int(folder.name))[1]), []).append(int(folder.name))
        except (OSError, IndexError):
            continue
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in parents.get(parent, [])]
        found += new
    return found


def describe(pid: int) -> str:
    """One paragraph: command, state, and where in the kernel it waits."""
    lines = [f"process {pid}: {_text(pid, 'cmdline').replace(chr(0), ' ').strip()[:200]}"]
    for line in _text(pid, "status").splitlines():
        if line.startswith(("State:", "VmRSS:", "Threads:")):
            lines.append("  " + " ".join(line.split()))
    for name in ("wchan", "syscall", "stack"):
        if content := _text(pid, name).strip():
            lines += [f"  {name}: " + content.replace("\n", "\n    ")]
    return "\n".join(lines)


def read_bytes(pid: int) -> int:
    """Bytes that the process has read so far, by any file system (``rchar``)."""
    for line in _text(pid, "io").splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    return 0


def _fields(pid: int) -> list[str]:
    """``/proc/PID/stat`` from the state on: a command's name may hold blanks and brackets."""
    text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def _text(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""
