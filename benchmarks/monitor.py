"""Cost of being watched: a heartbeat, compared with an alternative, and the watchdog's CPU time.

A heartbeat writes integers to mapped memory. It is compared with reading the clock, the least that
a heartbeat can do, and with a message to a monitor process over a Unix socket that is answered
before training continues, as nvidia-resiliency-ext's `RankMonitorClient.send_heartbeat` does it
(rank_monitor_client.py, 2025). The busy time of a step is measured with the host's clocks; on a GPU
it takes CUDA events instead. Figures are medians of interleaved rounds. Then a real watchdog with
the run file's defaults watches eight processes for over a minute, so that this includes one `node`
event; its CPU time, all of it counted against one core's training, is printed as a share.

    python benchmarks/monitor.py
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from sm_train.entrypoints.job_interface.job_config import JOB_FILE
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase, heartbeat_file
from sm_train.entrypoints.training.busy_time import BusyTimer
from sm_train.estimators.bundle.job_configs import job_configs
from sm_train.estimators.config.schema import RunConfig

ROUNDS, HEARTBEATS = 9, 20_000
PROCESSES, SECONDS = 8, 75.0
STEP_SECONDS, HEARTBEATS_PER_STEP = 0.1, 2
BUDGET = 0.005

_REPLYING = """
import pickle, socket, struct
connection = socket.socket(fileno=0)
while size := connection.recv(4, socket.MSG_WAITALL):
    pickle.loads(connection.recv(struct.unpack("!L", size)[0], socket.MSG_WAITALL))
    connection.sendall(b"ok")
"""


def main() -> None:
    """Measure on this computer."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        heartbeat = measure_heartbeat(Path(folder))
        busy = measure_busy_timer(Path(folder))
        share = measure_watchdog(Path(folder))
    cost = HEARTBEATS_PER_STEP * heartbeat / 1e9 / STEP_SECONDS
    busy_cost = busy / 1e9 / STEP_SECONDS
    total = cost + busy_cost + share
    print(
        f"of a {STEP_SECONDS * 1000:.0f} ms step: heartbeats {cost:.4%}, busy time "
        f"{busy_cost:.4%}, watchdog {share:.3%}"
    )
    print(f"together {total:.3%}; at most {BUDGET:.1%} is allowed")
    sys.exit(total > BUDGET)


def measure_heartbeat(folder: Path) -> float:
    """Return the nanoseconds of a heartbeat."""
    writer = HeartbeatWriter(folder / "writer", rank=0, local_rank=0)
    own_end, other_end = socket.socketpair()
    replying = subprocess.Popen([sys.executable, "-c", _REPLYING], stdin=other_end.fileno())
    other_end.close()

    def request(number: int) -> None:
        message = pickle.dumps({"rank": 0, "phase": "step", "step": number})
        own_end.sendall(struct.pack("!L", len(message)) + message)
        own_end.recv(64)

    methods: dict[str, tuple[Callable[[int], object], int]] = {
        "reading the clock": (lambda number: time.monotonic_ns(), HEARTBEATS),
        "a heartbeat": (lambda number: writer.enter(Phase.STEP, number), HEARTBEATS),
        "a message with a reply": (request, HEARTBEATS // 10),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(ROUNDS):
        for name, (call, times) in methods.items():
            started = time.perf_counter()
            for number in range(times):
                call(number)
            seconds[name].append((time.perf_counter() - started) / times)
    own_end.close()
    replying.wait()
    medians = {name: statistics.median(found) * 1e9 for name, found in seconds.items()}
    for name, nanoseconds in medians.items():
        print(f"{name:20} {nanoseconds:8.0f} ns  {nanoseconds / medians['a heartbeat']:6.2f} ×")
    return medians["a heartbeat"]


def measure_busy_timer(folder: Path) -> float:
    """Return the nanoseconds of a step's busy time with the host's clocks, as with Gloo."""
    writer = HeartbeatWriter(folder / "busy", rank=0, local_rank=0)
    timer = BusyTimer(writer.add_busy, torch.device("cpu"))
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(HEARTBEATS // 10):
            # As DDP's steps: a broadcast of buffers, then the all-reduces of gradients.
            timer.begin_step()
            timer.begin_wait()
            timer.end_wait()
            timer.begin_collectives()
            timer.resume()
            timer.end_step()
        seconds.append((time.perf_counter() - started) / (HEARTBEATS // 10))
    nanoseconds = statistics.median(seconds) * 1e9
    print(f"{'busy time of a step':20} {nanoseconds:8.0f} ns")
    return nanoseconds


def measure_watchdog(folder: Path) -> float:
    """Return the CPU seconds of the watchdog per second of watching, after it has started."""
    run = {
        "name": "watched",
        "data": {"uri": "s3://my-bucket/shards/"},
        "model": {"preset": "digits"},
        "stages": [
            {
                "name": "one",
                "resolution": 8,
                "instances": 1,
                "per_device_batch_size": 1,
                "max_steps": 1,
                "learning_rate": 1e-4,
                "sharding": "none",
            }
        ],
        "cluster": {"instance_type": "ml.p4de.24xlarge"},
    }
    document = folder / JOB_FILE
    configs = job_configs(RunConfig.model_validate(run))
    document.write_text(json.dumps({name: asdict(config) for name, config in configs.items()}))
    heartbeats = folder / "heartbeats"
    writers = [
        HeartbeatWriter(heartbeat_file(heartbeats, rank), rank=rank, local_rank=rank)
        for rank in range(PROCESSES)
    ]
    command = [
        sys.executable,
        "-m",
        "sm_train.entrypoints.monitoring.watchdog.watchdog",
    ]
    command += ["--document", str(document), "--stage", "one", "--heartbeats", str(heartbeats)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(folder), "LOCAL_WORLD_SIZE": str(PROCESSES)},
    ) as watchdog:
        send_heartbeats(writers, 10.0)
        before, started = cpu_seconds(watchdog.pid), time.monotonic()
        send_heartbeats(writers, SECONDS)
        spent, seconds = cpu_seconds(watchdog.pid) - before, time.monotonic() - started
        memory = psutil.Process(watchdog.pid).memory_info().rss
        output, _ = watchdog.communicate()
    assert b'"kind": "node"' in output, output
    print(
        f"watchdog of {PROCESSES} processes: {spent:.2f} s of CPU time in {seconds:.0f} s, "
        f"{memory / 2**20:.0f} MiB"
    )
    return spent / seconds


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process's threads, from the scheduler's own clock.

    The times in ``/proc/PID/stat`` are sampled at ticks of 10 ms, in which a poll rarely falls.
    """
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def send_heartbeats(writers: list[HeartbeatWriter], seconds: float) -> None:
    """Simulate steps of all processes that wait for data a twentieth of the time."""
    deadline, step = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        for phase, share in ((Phase.DATA, 0.05), (Phase.STEP, 0.95)):
            for writer in writers:
                writer.enter(phase, step)
            time.sleep(STEP_SECONDS * share)
        step += 1


if __name__ == "__main__":
    main()
