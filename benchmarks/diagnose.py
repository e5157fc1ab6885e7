"""Benchmark: `diagnose` on the logs of 16 nodes, compared with `grep -E` for the words of errors.

The generated logs resemble real ones: NCCL's start-up, this project's events, progress bars, a few
warnings, and at the end a GPU out of memory on one node and its echoes on the others. Both read
from the page cache in interleaved rounds; grep uses the C locale and writes its lines to a file.
The output is the medians, their ratio, and the peak of diagnose's memory above that of its imports.

    python benchmarks/diagnose.py [MEGABYTES]      # 256; 1024 takes a minute
"""

from __future__ import annotations

import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sm_train.toolkit.analysis.diagnose.diagnosis import diagnose
from sm_train.toolkit.analysis.diagnose.log_files import log_files

ROUNDS, NODES, GPUS = 5, 16, 8
WORDS = "[Ee]rror|ERROR|Exception|Traceback|[Ff]ail|FAIL|[Kk]illed|[Aa]bort|NCCL WARN|Xid"
"""What an engineer would search the logs for."""
BEGIN = 1795260000.0


def main() -> None:
    """Write the logs, measure both, and check the diagnosis."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        logs = write_logs(Path(folder), megabytes * 2**20 // NODES)
        total = sum(log.stat().st_size for log in logs)
        print(
            f"{total / 1e9:.2f} GB in {NODES} logs, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds"
        )
        compare(logs, total)


def compare(logs: list[Path], total: int) -> None:
    """Run interleaved rounds of both."""
    diagnose(log_files(logs[:1]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    diagnose_times, grep_times = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        diagnosis = diagnose(log_files(logs))
        diagnose_times.append(time.perf_counter() - started)
        assert diagnosis.cause == "gpu-out-of-memory", diagnosis
        assert diagnosis.first is not None
        assert (diagnosis.first.node, diagnosis.first.rank) == ("algo-7", 51), diagnosis.first
        started = time.perf_counter()
        with (logs[0].parent / "grep.txt").open("wb") as out:
            subprocess.run(
                ["grep", "-E", "-n", "-e", WORDS, *logs],
                stdout=out,
                env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
                check=True,
            )
        grep_times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    medians = [statistics.median(seconds) for seconds in (diagnose_times, grep_times)]
    for name, seconds in (("diagnose", diagnose_times), ("grep -E", grep_times)):
        rate = total / statistics.median(seconds) / 1e6
        print(f"{name:<8}  {spread(seconds)}  {rate:.0f} MB/s")
    print(
        f"{medians[0] / medians[1]:.2f} × grep -E; {peak / 1024:.0f} MiB, "
        f"{(peak - before) / 1024:.0f} above the start"
    )


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


# ------------------------------------------------------------------ logs


def write_logs(folder: Path, size: int) -> list[Path]:
    """Write one log of about ``size`` bytes per node."""
    logs = []
    for node in range(NODES):
        log = folder / f"algo-{node + 1}.log"
        body = healthy(node)
        with log.open("w") as file:
            file.writelines(start(node))
            written = 0
            while written < size:
                file.write(body)
                written += len(body)
            file.writelines(failure(node))
        logs.append(log)
    return logs


def start(node: int) -> list[str]:
    host = f"algo-{node + 1}"
    return [
        f"{host}:{100 + gpu}:{400 + gpu} [{gpu}] NCCL INFO Channel {channel:02}/0 : "
        f"{node * GPUS + gpu}[{gpu}] -> {(node * GPUS + gpu + 1) % 128}[{gpu}] [send] via "
        "NET/AWS Libfabric/0/GDRDMA\n"
        for gpu in range(GPUS)
        for channel in range(16)
    ]


def healthy(node: int) -> str:
    """Return about 2 MB of the log of a healthy node."""
    rng = random.Random(node)
    lines = []
    for number in range(20_000):
        at = BEGIN + number / 2
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
        rank = node * GPUS + number % GPUS
        kind = number % 10
        if kind == 0:
            lines.append(
                f'SMT {{"kind": "step", "time": {at}, "node": {node}, "rank": {rank}, "step": '
                f'{number}, "epoch": 0, "loss": {rng.random():.6f}, "learning_rate": 0.0001, '
                f'"gradient_norm": {rng.random():.4f}, "steps_per_second": 1.81, '
                '"images_per_second": 3706.9, "data_wait_share": 0.01, "mfu": 0.21}'
            )
        elif kind == 1:
            lines.append(
                f'SMT {{"kind": "heartbeat", "time": {at}, "node": {node}, "rank": {rank}, '
                f'"step": {number}, "seconds_since_step": 0.4}}'
            )
        elif kind == 2:
            lines.append(f" {number % 100:3}%|███▌      | {number}/20000 [01:12<12:40, 1.81it/s]")
        elif kind == 3 and number % 1000 == 3:
            lines.append(f"{clock},123 WARNING loader: skipped 1 sample: image file is truncated")
        else:
            words = " ".join(f"{rng.getrandbits(48):x}" for _ in range(rng.randint(2, 9)))
            lines.append(f"{clock},{number % 1000:03} INFO trainer: [rank{rank}] {words}")
    return "\n".join(lines) + "\n"


def failure(node: int) -> list[str]:
    """Return the end of a log: one rank runs out of memory, the others report its exit."""
    if node == 6:
        return [
            "[rank51]: Traceback (most recent call last):\n",
            '[rank51]:   File "/opt/ml/code/train.py", line 88, in <module>\n',
            "[rank51]:     main()\n",
            "[rank51]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU "
            "3 has a total capacity of 79.15 GiB of which 1.29 GiB is free.\n",
        ]
    return [
        f"[rank{node * GPUS + gpu}]:[E1121 12:34:56.123456789 ProcessGroupNCCL.cpp:1333] [Rank "
        f"{node * GPUS + gpu}] NCCL error: remote process exited or there was a network error, "
        "NCCL version 2.21.5\n"
        for gpu in range(GPUS)
    ]


if __name__ == "__main__":
    main()
