"""Compares the doctor's predictions with real training on slow networks. Needs root and iperf3.

    python benchmarks/doctor.py

Network namespaces emulate hosts, ``tc tbf`` limits what each of them sends. At every rate the
doctor measures the network with Gloo, iperf3 measures it independently, and ``torchrun`` trains a
small model with DistributedDataParallel. The doctor's model predicts the step at each rate from its
sweep and from the compute time of one pass, measured once without communication; slow-downs are
relative to the first rate. Exits with 1 if a prediction is off by more than a quarter, or if Gloo
does not reach the stated share of iperf3's rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from sm_train.cost.network import CollectiveCalls
from sm_train.entrypoints.probes.measured_network import MeasuredNetwork
from sm_train.entrypoints.probes.measurements import GroupMeasurement, sweeps_from_store
from sm_train.entrypoints.probes.workload import Workload, predict_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.cluster.doctor_cluster import DoctorCluster
from tests.support.cluster.network_namespaces import (
    INTERFACE,
    NetworkNamespaces,
    network_namespaces,
    unavailable_reason,
)
from tests.support.cluster.training_jobs import Job, free_port, tiny_run

RATES = (1000.0, 300.0, 100.0)
"""Mbit/s."""

LAYERS, WIDTH, BATCH = 6, 1024, 256
STEPS = {1000.0: 8, 300.0: 6, 100.0: 4}
GLOO_SHARE = 0.6
"""Minimum share of iperf3's rate that Gloo's best bus bandwidth must reach on these cores."""

TOLERANCE = 0.25


@dataclass(frozen=True)
class TrainingTimes:
    """Median seconds of a pass without communication and of a step with it."""

    compute: float
    step: float
    gradient_bytes: int
    buckets: int


def train(steps: int) -> None:
    """Train in one process and print its medians as JSON."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=True)
    batch = torch.randn(BATCH, WIDTH)

    def timed_pass() -> float:
        torch.distributed.barrier()
        started = time.perf_counter()
        model(batch).square().mean().backward()
        return time.perf_counter() - started

    for _ in range(3):  # DDP rebuilds its buckets after the first
        timed_pass()
    step = statistics.median(timed_pass() for _ in range(steps))
    with model.no_sync():
        timed_pass()
        compute = statistics.median(timed_pass() for _ in range(9))
    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    buckets = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].count(",") + 1  # type: ignore[no-untyped-call]
    if torch.distributed.get_rank() == 0:
        print("RESULT", json.dumps([compute, step, gradient_bytes, buckets]), flush=True)
    os._exit(0)


def run_training(hosts: NetworkNamespaces, steps: int) -> TrainingTimes:
    port = str(free_port())
    count = len(hosts.names)
    processes = []
    for host in range(count):
        command = [*hosts.prefix(host), sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", str(count), "--node_rank", str(host), "--nproc_per_node", "1"]
        command += ["--master_addr", hosts.address(0), "--master_port", port]
        command += [__file__, "--train", str(steps)]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT"))
    return TrainingTimes(*json.loads(line.removeprefix("RESULT")))


def run_doctor(hosts: NetworkNamespaces, folder: Path) -> GroupMeasurement:
    count = len(hosts.names)
    job = Job(folder / "job", tiny_run(max_steps=1))
    prefixes = [hosts.prefix(host) for host in range(count)]
    cluster = DoctorCluster(
        folder, job, count, master=hosts.address(0), prefixes=prefixes, interface=INTERFACE
    )
    document = cluster.run()[0]["measurements"]["world"]
    ranks = document.pop("ranks")
    sweeps = {
        name: [(point["bytes"], point["seconds"]) for point in points]
        for name, points in document.items()
    }
    return sweeps_from_store({"ranks": ranks, "sweeps": sweeps})


def run_iperf(hosts: NetworkNamespaces) -> float:
    """Return the Mbit/s of one TCP stream between the first two hosts."""
    server = subprocess.Popen(
        [*hosts.prefix(0), "iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    client = subprocess.run(
        [*hosts.prefix(1), "iperf3", "-c", hosts.address(0), "-t", "3", "-J"],
        capture_output=True,
        text=True,
        check=True,
    )
    server.communicate()
    return float(json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"]) / 1e6


def compare(count: int, rates: Sequence[float]) -> bool:
    """Print one line per rate; returns whether all predictions and bandwidths are close enough."""
    print(f"{count} hosts: {LAYERS} layers of {WIDTH} × {WIDTH}, batch {BATCH}")
    print(
        "  Mbit/s    iperf3   Gloo busbw   share   step s  predicted  slow-down  predicted  error"
    )
    first: tuple[float, float] | None = None
    compute, passed = 0.0, True
    for rate in rates:
        with network_namespaces(count) as hosts, tempfile.TemporaryDirectory() as folder:
            for host in range(count):
                hosts.limit_egress(host, rate)
            iperf = run_iperf(hosts)
            network = run_doctor(hosts, Path(folder))
            trained = run_training(hosts, STEPS[rate])
        compute = compute or trained.compute
        bucket_bytes = trained.gradient_bytes / trained.buckets
        reduced = CollectiveCalls("all_reduce", "world", bucket_bytes, trained.buckets, "backward")
        predicted = predict_step(
            Workload(compute, 1, (reduced,)), MeasuredNetwork(count, 1, {"world": network.sweeps})
        )
        first = first or (trained.step, predicted.seconds)
        measured, slowdown = trained.step / first[0], predicted.seconds / first[1]
        error = slowdown / measured - 1
        busbw = (network.best_busbw() or 0.0) * 8 / 1e6
        passed &= abs(error) <= TOLERANCE and busbw >= GLOO_SHARE * iperf
        print(
            f"  {rate:6.0f}  {iperf:8.0f}  {busbw:11.0f}  {busbw / iperf:6.0%}  {trained.step:7.2f}"
            f"  {predicted.seconds:9.2f}  {measured:8.2f}×  {slowdown:8.2f}×  {error:+5.0%}",
            flush=True,
        )
    print(f"  compute alone: {compute:.2f} s a pass")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    if options.train:
        train(options.train)
    if reason := unavailable_reason():
        print(f"skipped: {reason}")
        return
    passed = [compare(count, RATES) for count in options.hosts]
    if not all(passed):
        sys.exit(1)


if __name__ == "__main__":
    main()
