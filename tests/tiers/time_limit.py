"""Runs a command, and ends it with all of its processes when a time limit has passed.

    python tests/tiers/time_limit.py SECONDS COMMAND [ARGUMENT]...

At the end it prints the processor time of all of its processes. Before it kills them, it prints
the Python stacks of all processes, with the py-spy of their environments. Needs the standard
library only, so that it also limits the installation.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

_DUMP_SECONDS = 20
"""A process that cannot be examined must not delay the end."""


def main(arguments: list[str]) -> int:
    """Return the command's exit code, or 124 after the limit, as timeout(1) does."""
    limit, command = float(arguments[0]), arguments[1:]
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        code = process.wait(limit)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{(used.ru_utime + used.ru_stime) / 60:.1f} minutes of CPU", flush=True)
        return code
    except subprocess.TimeoutExpired:
        print(f"\nstopped after {limit / 60:.0f} minutes; the stacks of all processes:", flush=True)
    except KeyboardInterrupt:  # the terminal interrupts the command as well
        return process.wait()
    running = descendants(process.pid)
    for pid in running:
        show_stack(pid)
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return 124


def descendants(root: int) -> list[int]:
    """Return ``root`` and all processes that it started, parents first."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The command's name, in parentheses, may contain anything.
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            children[int(parent)].append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def show_stack(pid: int) -> None:
    """Print the command line of a process and, of a Python process, the stack of every thread."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return
    print(f"\n--- {pid}: {' '.join(words)[:200]}", flush=True)
    spy = Path(words[0]).with_name("py-spy")
    if "python" in Path(words[0]).name and spy.is_file():
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([spy, "dump", "--pid", str(pid)], timeout=_DUMP_SECONDS, check=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
