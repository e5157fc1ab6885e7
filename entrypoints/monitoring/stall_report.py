"""What is kept of a stall: stacks, NCCL's flight recorder, the last events, the machine's state.

Everything goes below ``stalls/`` in the checkpoints' folder, from where the platform copies it to
S3, under names that no other process and no other attempt uses.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.common import procfs
from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.entrypoints.common.checkpoint_layout import step_folder_name
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatSample, stacks_file
from sm_train.entrypoints.monitoring.stack_dump import stacks, waits_in_collective

FOLDER = "stalls"

_SECONDS, _RECORDER_SECONDS, _COMMAND_SECONDS = 15.0, 10.0, 10.0
_WORKERS = 16
"""Child processes of one rank whose stacks are taken, at most."""

_COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "-q", "-d", "ECC,TEMPERATURE,CLOCK,PERFORMANCE"),
    # What DCGM's host engine has seen by itself, where it was told to watch, and one sample of each
    # GPU: temperature, power, PCIe replays, utilization, last Xid, double-bit errors, failed row
    # remaps (dcgm_fields.h; dcgmi-health and dcgmi-dmon in NVIDIA's DCGM reference, 2026).
    ("dcgmi", "health", "--check"),
    ("dcgmi", "dmon", "--field-id", "150,155,202,203,230,311,395", "--count", "1"),
)

_TELLING = re.compile(
    r"\b(xid|nvrm|efa|nvme\d*|oom-killer|hung_task)\b|out of memory|i/o error|blocked for more",
    re.IGNORECASE,
)
"""What in the kernel's log may explain a stall."""


@dataclass(frozen=True)
class StallReport:
    """``files`` are names below ``folder``; ``waits`` says of each rank whether it stands in a
    collective.
    """

    folder: Path
    files: tuple[str, ...]
    waits: Mapping[int, bool | None]


def collect(
    checkpoints: Path,
    signs: Sequence[HeartbeatSample],
    *,
    node: int,
    pulses: Path,
    stamp: str,
    story: str,
) -> StallReport:
    """Write down what can be had of this machine's processes; ``story`` says what happened."""
    folder = checkpoints / FOLDER / step_folder_name(max(sign.step for sign in signs))
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []

    def keep(name: str, content: bytes) -> None:
        unique = f"{stamp}-node-{node:03d}-{name}"
        write_atomic(folder / unique, content)
        written.append(unique)

    keep("what.txt", story.encode())
    # Not waited for at the end: a program that hangs in the kernel cannot even be killed.
    pool = ThreadPoolExecutor(3 * len(signs) + 1)
    looks = {
        one.rank: pool.submit(stacks, one.pid, stacks_file(pulses, one.local_rank)) for one in signs
    }
    workers = {one.rank: pool.submit(_workers_stacks, one.pid) for one in signs}
    records = {one.rank: pool.submit(_flight_record, one.rank) for one in signs}
    machine = pool.submit(_machine, [one.pid for one in signs])
    pool.shutdown(wait=False)
    for path in sorted(pulses.glob("events-*")):
        keep(f"{path.name}.log", path.read_bytes())
    waits: dict[int, bool | None] = {}
    for rank, look in looks.items():
        with suppress(TimeoutError):
            text = look.result(_SECONDS)
            waits[rank] = waits_in_collective(text)
            keep(f"rank-{rank:05d}-stacks.txt", text.encode())
    for name, found in (("workers.txt", workers), ("nccl", records)):
        for rank, one in found.items():
            with suppress(TimeoutError):
                if content := one.result(_SECONDS):
                    keep(f"rank-{rank:05d}-{name}", content)
    with suppress(TimeoutError):
        keep("machine.txt", machine.result(_SECONDS).encode())
    return StallReport(folder, tuple(sorted(written)), waits)


def _workers_stacks(pid: int) -> bytes:
    """Of the processes that a training process has started: loader workers."""
    return "\n".join(stacks(one, None, seconds=3) for one in _workers(pid)).encode()


def _workers(pid: int) -> list[int]:
    """What a training process has started, this process and its own left out."""
    found = procfs.descendants(pid)
    # Only then: commands that gather evidence are being started meanwhile.
    ours = {os.getpid(), *procfs.descendants(os.getpid())}
    return [one for one in found if one not in ours][:_WORKERS]


def _flight_record(rank: int) -> bytes:
    """NCCL's last collectives, which PyTorch dumps when its pipe is written to; empty without.

    PyTorch 2.3 knows the older variables only, later versions both (ProcessGroupNCCL.hpp).
    """
    environment = os.environ
    pipe = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    prefix = environment.get("TORCH_FR_DUMP_TEMP_FILE") or environment.get(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    )
    if not pipe or not prefix:
        return b""
    dump = Path(f"{prefix}{rank}")
    before = _stamp(dump)
    try:
        handle = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no NCCL in this process, or nobody at the pipe's other end
        return b""
    os.write(handle, b"1\n")
    os.close(handle)
    if not _settles(dump, before):
        return b""
    return dump.read_bytes()


def _settles(path: Path, before: tuple[int, int]) -> bool:
    """Wait until a file has changed, and then no more."""
    last, deadline = before, time.monotonic() + _RECORDER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = _stamp(path)
        if now != before and now == last:
            return True
        last = now
    return False


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


def _machine(pids: Sequence[int]) -> str:
    """Processes in the kernel's words, GPUs in NVIDIA's, and what the kernel complained of."""
    family = [one for pid in pids for one in (pid, *_workers(pid))]
    # All at once: one that hangs costs the others nothing.
    pool = ThreadPoolExecutor(len(_COMMANDS) + 1)
    outputs = [pool.submit(_output, command) for command in _COMMANDS]
    kernel = pool.submit(_output, ("dmesg",))
    pool.shutdown(wait=False)
    deadline = time.monotonic() + _COMMAND_SECONDS + 1.0
    parts = [procfs.describe(one) for one in family]
    for one in outputs:
        with suppress(TimeoutError):
            parts.append(one.result(max(0.0, deadline - time.monotonic())))
    with suppress(TimeoutError):
        log = kernel.result(max(0.0, deadline - time.monotonic()))
        complaints = [line for line in log.splitlines() if _TELLING.search(line)]
        if complaints:
            parts.append("kernel log:\n" + "\n".join(complaints[-50:]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(command: Sequence[str]) -> str:
    """What a command prints, below its own name; nothing where it is not there.

    Also of one that fails: nvidia-smi then says which GPU it has lost.
    """
    if shutil.which(command[0]) is None:
        return ""
    title = f"$ {' '.join(command)}"
    try:
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMMAND_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{title}\n{type(error).__name__}"
    failed = f" (exit {run.returncode})" if run.returncode else ""
    return f"{title}{failed}\n{run.stdout.rstrip()}"
