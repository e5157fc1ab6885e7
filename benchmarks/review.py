"""Benchmark: review of a 14-day job on 16 nodes, compared with json.loads of the same lines.

The job has a million event lines in 16 saved logs: a step every 3.4 seconds, and for each node a
heartbeat and a ``node`` event with its GPUs and ranks every minute. A server on loopback, in a
separate process, provides CloudWatch metrics for every minute. The benchmark measures everything
from the files to the written page. The baseline finds the same lines and parses each with
json.loads, without using the result.

    python benchmarks/review.py [DAYS]      # 14; takes a gigabyte in /dev/shm
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import boto3
from cloudwatch_metrics import memory, serve
from sm_train.entrypoints.job_interface.events import format_event
from sm_train.toolkit.analysis.review.build import review_job
from sm_train.toolkit.analysis.review.collect import FactsCollector
from sm_train.toolkit.analysis.review.review_model import Review
from sm_train.toolkit.analysis.review.review_page import write_page
from sm_train.toolkit.analysis.review.sources import local_sources
from sm_train.toolkit.aws.cloudwatch_metrics import instance_metrics
from sm_train.toolkit.planning.price_table import price_table

NODES, GPUS, STEP_SECONDS = 16, 8, 3.4
BEGIN = 1795260000.0


def main() -> None:
    """Write the logs, review them, and run the baseline."""
    days = float(sys.argv[1]) if len(sys.argv) > 1 else 14.0
    end = BEGIN + days * 86400
    ready, child = multiprocessing.Pipe()
    multiprocessing.Process(target=serve, args=(child,), daemon=True).start()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ready.recv()}"
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        lines = write_logs(folder / "saved", end)
        size = sum(log.stat().st_size for log in (folder / "saved").iterdir())
        print(
            f"{lines / 1e6:.2f} million event lines, {size / 1e9:.2f} GB, {days:g} days on "
            f"{NODES} nodes, load {os.getloadavg()[0]:.1f}"
        )
        before, started, cpu = memory(), time.perf_counter(), time.process_time()
        facts = FactsCollector("us-east-1", price_table()).collect(
            local_sources(folder / "saved")[0]
        )
        parsed = time.perf_counter()
        instances = [f"algo-{number + 1}" for number in range(NODES)]
        metrics = instance_metrics(session, "job", instances, BEGIN, end, now=end)
        fetched = time.perf_counter()
        review = Review((review_job(replace(facts, metrics=metrics)),))
        judged = time.perf_counter()
        write_page(folder / "review.html", review)
        ended = time.perf_counter()
        cpu = time.process_time() - cpu
        peak, page = memory(), (folder / "review.html").stat().st_size
        baseline = parse_with_json(folder / "saved")
    points = sum(len(metric.times) for metric in metrics.values())
    print(
        f"review {ended - started:6.1f} s: lines {parsed - started:.1f}, {points / 1e6:.2f} "
        f"million points {fetched - parsed:.1f}, verdicts {judged - fetched:.1f}, "
        f"page {ended - judged:.1f} ({page / 1e6:.1f} MB)"
    )
    print(f"       {cpu:6.1f} s of CPU time")
    print(f"json   {baseline:6.1f} s; lines in {(parsed - started) / baseline:.2f} × that")
    print(f"memory {peak:.0f} MiB, {peak - before:.0f} above the start")


def parse_with_json(folder: Path) -> float:
    started = time.perf_counter()
    for log in folder.iterdir():
        with log.open("rb") as file:
            for line in file:
                if line.startswith(b"SMT {"):
                    json.loads(line[4:])
    return time.perf_counter() - started


def write_logs(folder: Path, end: float) -> int:
    """Write one log per node; return the number of event lines."""
    folder.mkdir()
    rng, written = random.Random(0), 0
    for node in range(NODES):
        with (folder / f"algo-{node + 1}.log").open("w") as log:
            if node == 0:
                written += write_steps(log, end, rng)
            at = BEGIN + 60
            while at < end:
                for line in (heartbeat(node, at), node_line(node, at, rng)):
                    log.write(f"node {node}: a line that is no event\n{line}\n")
                    written += 1
                at += 60
    return written


def write_steps(log, end: float, rng: random.Random) -> int:  # type: ignore[no-untyped-def]
    start = {
        "run": "bria",
        "stage": "s256",
        "resolution": 256,
        "world_size": NODES * GPUS,
        "nodes": NODES,
        "per_device_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "effective_batch_size": 2048,
        "max_steps": 3_000_000,
        "parameters": 865_910_724,
        "backend": "nccl",
        "backend_reason": "",
        "precision": "bf16",
        "resumed_from_step": None,
        "instance_type": "ml.p4de.24xlarge",
    }
    log.write(format_event("start", start, time=BEGIN, node=0, rank=0) + "\n")
    at, step, written = BEGIN, 0, 1
    while at < end:
        speed = rng.gauss(1.8, 0.02)
        at, step = at + STEP_SECONDS, step + max(1, round(STEP_SECONDS * speed))
        fields = {
            "step": step,
            "epoch": 0,
            "loss": rng.gauss(0.12, 0.002),
            "learning_rate": 1e-4,
            "gradient_norm": rng.gauss(1, 0.1),
            "steps_per_second": speed,
            "images_per_second": speed * 2048,
            "data_wait_share": 0.004,
            "mfu": 0.2,
        }
        line = format_event("step", fields, time=at, node=0, rank=0)
        log.write(f"step {step}: a line that is no event\n{line}\n")
        written += 1
    done = {
        "step": step,
        "reason": "done",
        "training_seconds": end - BEGIN,
        "images": step * 2048,
        "steps_per_second": 1.8,
    }
    log.write(format_event("end", done, time=end, node=0, rank=0) + "\n")
    return written + 1


def heartbeat(node: int, at: float) -> str:
    fields = {"step": 1, "seconds_since_step": 0.3}
    return format_event("heartbeat", fields, time=at, node=node, rank=GPUS * node)


def node_line(node: int, at: float, rng: random.Random) -> str:
    gpus = [
        {
            "gpu": gpu,
            "utilization": 98,
            "memory_used": 70_000_000_000,
            "temperature": 60,
            "sm_clock": 1410,
            "power": 380.1,
            "ecc_uncorrected": 0,
            "ecc_corrected": 0,
        }
        for gpu in range(GPUS)
    ]
    ranks = [
        {
            "rank": GPUS * node + local_rank,
            "steps": 108,
            "p50": round(rng.gauss(0.555, 0.001), 4),
            "p90": 0.56,
            "p99": 0.58,
            "max": 0.61,
            "data_wait_share": 0.004,
            "busy_seconds": 0.31,
            "cpu_wait_seconds": 0.002,
        }
        for local_rank in range(GPUS)
    ]
    fields = {
        "network_receive_bytes_per_second": 1.5e6,
        "network_send_bytes_per_second": 1.5e6,
        "efa_receive_bytes_per_second": 2.1e10,
        "efa_send_bytes_per_second": 2.1e10,
        "efa_drops": 0,
        "efa_retransmits": 0,
        "disk_read_bytes_per_second": 1e6,
        "disk_write_bytes_per_second": 1e6,
        "read_bytes_per_second": 2.3e8,
        "nvlink_bytes_per_second": 4.4e11,
        "gpu_utilization_mean": 98.4,
        "gpu_utilization_min": 97.0,
        "gpu_memory_used_max": 7.1e10,
        "gpu_clock_min": 1410.0,
        "gpu_power_mean": 380.2,
        "gpu_ecc_uncorrected": 0,
        "straggler_ratio": 1.01,
        "gpu_temperature_max": 66.0,
        "data_wait_share_max": 0.006,
        "gpus": gpus,
        "ranks": ranks,
    }
    return format_event("node", fields, time=at, node=node, rank=GPUS * node)


if __name__ == "__main__":
    main()
