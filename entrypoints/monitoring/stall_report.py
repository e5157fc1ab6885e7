"""Stall reports: stacks, NCCL's flight recorder, the last events and the node's state.

Everything is written below ``stalls/`` in the checkpoint folder, which the platform copies to S3,
under names that no other process and no other attempt uses.
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

from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.entrypoints.job_interface.checkpoint_layout import step_folder_name
from sm_train.entrypoints.monitoring import procfs
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatSample, stacks_file
from sm_train.entrypoints.monitoring.stack_dump import stacks, waits_in_collective

FOLDER = "stalls"

_PART_SECONDS, _RECORDER_SECONDS, _COMMAND_SECONDS = 15.0, 10.0, 10.0
_MAX_WORKERS = 16
"""Maximum number of child processes of one rank whose stacks are dumped."""

_COMMANDS = (
    ("nvidia-smi",),
    ("nvidia-smi", "-q", "-d", "ECC,TEMPERATURE,CLOCK,PERFORMANCE"),
    # What DCGM's host engine has recorded, if it was configured to watch, and one sample of each
    # GPU: temperature, power, PCIe replays, utilization, last Xid, double-bit errors, failed row
    # remaps (dcgm_fields.h; dcgmi-health and dcgmi-dmon in NVIDIA's DCGM reference, 2026).
    ("dcgmi", "health", "--check"),
    ("dcgmi", "dmon", "--field-id", "150,155,202,203,230,311,395", "--count", "1"),
)

_KERNEL_ERROR = re.compile(
    r"\b(xid|nvrm|efa|nvme\d*|oom-killer|hung_task)\b|out of memory|i/o error|blocked for more",
    re.IGNORECASE,
)
"""Lines of the kernel's log that may explain a stall."""


@dataclass(frozen=True)
class StallReport:
    """The ``files`` written below ``folder``, and rank → whether it waits in a collective."""

    folder: Path
    files: tuple[str, ...]
    in_collective: Mapping[int, bool | None]


def collect(
    checkpoints: Path,
    samples: Sequence[HeartbeatSample],
    *,
    node: int,
    heartbeats: Path,
    timestamp: str,
    summary: str,
) -> StallReport:
    """Write everything that is available about this node's processes, and the ``summary``."""
    folder = checkpoints / FOLDER / step_folder_name(max(sample.step for sample in samples))
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []

    def write(name: str, content: bytes) -> None:
        unique = f"{timestamp}-node-{node:03d}-{name}"
        write_atomic(folder / unique, content)
        written.append(unique)

    write("summary.txt", summary.encode())
    # Every part has its own thread and timeout, and none is joined: a program that hangs in the
    # kernel cannot even be killed.
    pool = ThreadPoolExecutor(3 * len(samples) + 1)
    rank_stacks = {
        sample.rank: pool.submit(stacks, sample.pid, stacks_file(heartbeats, sample.local_rank))
        for sample in samples
    }
    workers = {sample.rank: pool.submit(_worker_stacks, sample.pid) for sample in samples}
    records = {sample.rank: pool.submit(_flight_record, sample.rank) for sample in samples}
    system = pool.submit(_system_state, [sample.pid for sample in samples])
    pool.shutdown(wait=False)
    for path in sorted(heartbeats.glob("events-*")):
        write(f"{path.name}.log", path.read_bytes())
    in_collective: dict[int, bool | None] = {}
    for rank, dump in rank_stacks.items():
        with suppress(TimeoutError):
            text = dump.result(_PART_SECONDS)
            in_collective[rank] = waits_in_collective(text)
            write(f"rank-{rank:05d}-stacks.txt", text.encode())
    for name, parts in (("workers.txt", workers), ("nccl", records)):
        for rank, part in parts.items():
            with suppress(TimeoutError):
                if content := part.result(_PART_SECONDS):
                    write(f"rank-{rank:05d}-{name}", content)
    with suppress(TimeoutError):
        write("system.txt", system.result(_PART_SECONDS).encode())
    return StallReport(folder, tuple(sorted(written)), in_collective)


def _worker_stacks(pid: int) -> bytes:
    """Return the stacks of the processes that a training process has started: loader workers."""
    return "\n".join(stacks(worker, None, seconds=3) for worker in _workers(pid)).encode()


def _workers(pid: int) -> list[int]:
    """Return a training process's descendants, without this process and its own."""
    descendants = procfs.descendants(pid)
    # Listed after the others: commands of this report are being started meanwhile.
    own = {os.getpid(), *procfs.descendants(os.getpid())}
    return [descendant for descendant in descendants if descendant not in own][:_MAX_WORKERS]


def _flight_record(rank: int) -> bytes:
    """Return NCCL's flight record, which PyTorch dumps when its pipe is written to; empty without.

    PyTorch 2.3 knows only the older variables, later versions both (ProcessGroupNCCL.hpp).
    """
    environment = os.environ
    pipe = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    prefix = environment.get("TORCH_FR_DUMP_TEMP_FILE") or environment.get(
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    )
    if not pipe or not prefix:
        return b""
    dump = Path(f"{prefix}{rank}")
    before = _file_state(dump)
    try:
        handle = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no NCCL in this process, or no reader at the pipe's other end
        return b""
    os.write(handle, b"1\n")
    os.close(handle)
    if not _wait_until_written(dump, before):
        return b""
    return dump.read_bytes()


def _wait_until_written(path: Path, before: tuple[int, int]) -> bool:
    """Wait until a file has changed and stopped changing; returns whether it has."""
    last, deadline = before, time.monotonic() + _RECORDER_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        now = _file_state(path)
        if now != before and now == last:
            return True
        last = now
    return False


def _file_state(path: Path) -> tuple[int, int]:
    """Return (modification time in ns, bytes); zeros if the file does not exist."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_size)


def _system_state(pids: Sequence[int]) -> str:
    """Return the kernel's state of the processes, the GPUs' state, and kernel log lines."""
    processes = [worker for pid in pids for worker in (pid, *_workers(pid))]
    # In parallel: a command that hangs does not delay the others.
    pool = ThreadPoolExecutor(len(_COMMANDS) + 1)
    outputs = [pool.submit(_output, command) for command in _COMMANDS]
    kernel = pool.submit(_output, ("dmesg",))
    pool.shutdown(wait=False)
    deadline = time.monotonic() + _COMMAND_SECONDS + 1.0
    parts = [procfs.describe(process) for process in processes]
    for output in outputs:
        with suppress(TimeoutError):
            parts.append(output.result(max(0.0, deadline - time.monotonic())))
    with suppress(TimeoutError):
        log = kernel.result(max(0.0, deadline - time.monotonic()))
        errors = [line for line in log.splitlines() if _KERNEL_ERROR.search(line)]
        if errors:
            parts.append("kernel log:\n" + "\n".join(errors[-50:]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(command: Sequence[str]) -> str:
    """Return a command's output below its name; empty if the command does not exist.

    Output of a failing command counts as well: nvidia-smi then names the GPU that it has lost.
    """
    if shutil.which(command[0]) is None:
        return ""
    title = f"$ {' '.join(command)}"
    try:
        process = subprocess.run(
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
    failed = f" (exit {process.returncode})" if process.returncode else ""
    return f"{title}{failed}\n{process.stdout.rstrip()}"
