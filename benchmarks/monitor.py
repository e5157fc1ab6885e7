"""What being watched costs: a beat, beside another way to give one, and the monitor's own time.

A beat writes integers to mapped memory. Beside it: reading the clock, which is the least a beat
can do, and a message to a monitor process by a Unix socket that is answered before training goes
on, as nvidia-resiliency-ext's `RankMonitorClient.send_heartbeat` does it (rank_monitor_client.py,
2025). Medians of interleaved rounds. Then a real monitor with the run file's defaults watches eight
processes for over a minute, so that one `node` event is in it; its processor time, all of which is
counted against one core's training, is printed as a share.

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
from sm_train.entrypoints.common.job_config import JOB_FILE
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase, heartbeat_file
from sm_train.estimators.bundle.job_configs import job_configs
from sm_train.estimators.config.schema import RunConfig

ROUNDS, BEATS = 9, 20_000
PROCESSES, SECONDS = 8, 75.0
STEP_SECONDS, BEATS_PER_STEP = 0.1, 2
BUDGET = 0.005

_ANSWERING = """
import pickle, socket, struct
here = socket.socket(fileno=0)
while size := here.recv(4, socket.MSG_WAITALL):
    pickle.loads(here.recv(struct.unpack("!L", size)[0], socket.MSG_WAITALL))
    here.sendall(b"ok")
"""


def main() -> None:
    """Measure on this machine."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        beat = measure_beats(Path(folder))
        share = measure_monitor(Path(folder))
    cost = BEATS_PER_STEP * beat / 1e9 / STEP_SECONDS
    total = cost + share
    print(f"of a {STEP_SECONDS * 1000:.0f} ms step: beats {cost:.4%}, monitor {share:.3%}")
    print(f"together {total:.3%}; at most {BUDGET:.1%} is allowed")
    sys.exit(total > BUDGET)


def measure_beats(folder: Path) -> float:
    """Nanoseconds of a beat."""
    pulse = HeartbeatWriter(folder / "pulse", rank=0, local_rank=0)
    here, there = socket.socketpair()
    answering = subprocess.Popen([sys.executable, "-c", _ANSWERING], stdin=there)
    there.close()

    def ask(number: int) -> None:
        message = pickle.dumps({"rank": 0, "section": "step", "step": number})
        here.sendall(struct.pack("!L", len(message)) + message)
        here.recv(64)

    ways: dict[str, tuple[Callable[[int], object], int]] = {
        "reading the clock": (lambda number: time.monotonic_ns(), BEATS),
        "a beat": (lambda number: pulse.enter(Phase.STEP, number), BEATS),
        "an answered message": (ask, BEATS // 10),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (way, times) in ways.items():
            started = time.perf_counter()
            for number in range(times):
                way(number)
            seconds[name].append((time.perf_counter() - started) / times)
    here.close()
    answering.wait()
    medians = {name: statistics.median(found) * 1e9 for name, found in seconds.items()}
    for name, nanoseconds in medians.items():
        print(f"{name:20} {nanoseconds:8.0f} ns  {nanoseconds / medians['a beat']:6.2f} ×")
    return medians["a beat"]


def measure_monitor(folder: Path) -> float:
    """Processor seconds of the monitor in a second of watching, once it has started."""
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
            }
        ],
        "cluster": {"instance_type": "ml.p4de.24xlarge"},
    }
    document = folder / JOB_FILE
    configs = job_configs(RunConfig.model_validate(run))
    document.write_text(json.dumps({name: asdict(config) for name, config in configs.items()}))
    pulses = folder / "pulses"
    beating = [
        HeartbeatWriter(heartbeat_file(pulses, rank), rank=rank, local_rank=rank)
        for rank in range(PROCESSES)
    ]
    command = [
        sys.executable,
        "-m",
        "sm_train.entrypoints.monitoring.watchdog",
        "--document",
        str(document),
    ]
    command += ["--document", str(document), "--stage", "one", "--pulses", str(pulses)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "SAGEMAKER_BASE_DIR": str(folder), "LOCAL_WORLD_SIZE": str(PROCESSES)},
    ) as monitor:
        beat_for(beating, 10.0)
        process = psutil.Process(monitor.pid)
        before, started = process.cpu_times(), time.monotonic()
        beat_for(beating, SECONDS)
        after, seconds = process.cpu_times(), time.monotonic() - started
        memory = process.memory_info().rss
        said, _ = monitor.communicate()
    assert b'"kind": "node"' in said, said
    spent = after.user + after.system - before.user - before.system
    print(
        f"monitor of {PROCESSES} processes: {spent:.2f} s of processor time in {seconds:.0f} s, "
        f"{memory / 2**20:.0f} MiB"
    )
    return spent / seconds


def beat_for(beating: list[HeartbeatWriter], seconds: float) -> None:
    """Steps of all processes, a twentieth of it waiting for data."""
    deadline, step = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        for section, share in ((Phase.DATA, 0.05), (Phase.STEP, 0.95)):
            for pulse in beating:
                pulse.enter(section, step)
            time.sleep(STEP_SECONDS * share)
        step += 1


if __name__ == "__main__":
    main()
