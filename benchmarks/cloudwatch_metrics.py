"""Benchmark: reading a job's CloudWatch metrics, compared with plain boto3.

A server on loopback implements GetMetricData in AWS's JSON protocol: 14 days of 16 instances with
five metrics each and one point per minute, 1.6 million in total. It runs in a separate process, so
that the printed CPU time and memory are the reader's alone. boto3, with its own parser of times,
makes one of the calls; its seconds are scaled by the number of calls.

    python benchmarks/cloudwatch_metrics.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any

import boto3
from sm_train.toolkit.aws.cloudwatch_metrics import instance_metrics

DAYS, NODES, ROUNDS = 14, 16, 3
NOW = 1795260000.0
INSTANCES = [f"algo-{number + 1}" for number in range(NODES)]


def main() -> None:
    """Read everything several times, and make one call with plain boto3."""
    ready, child = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(child,), daemon=True)
    server.start()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ready.recv()}"
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    before = memory()
    seconds, cpu_seconds = [], []
    for _ in range(ROUNDS):
        started, cpu = time.perf_counter(), time.process_time()
        metrics = instance_metrics(session, "job", INSTANCES, NOW - DAYS * 86400, NOW, now=NOW)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu)
    points = sum(metric.times.size for metric in metrics.values())
    assert points == DAYS * 1440 * NODES * 5, points
    print(f"{points / 1e6:.2f} million points, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds")
    print(
        f"ours   {spread(seconds)}, CPU {spread(cpu_seconds)}, "
        f"{memory() - before:.0f} MiB above {before:.0f}"
    )
    client = session.client("cloudwatch")
    cpu = time.process_time()
    page = client.get_metric_data(**one_call())
    share = sum(len(series["Values"]) for series in page["MetricDataResults"]) / points
    boto3_seconds = (time.process_time() - cpu) / share
    print(f"boto3  CPU {boto3_seconds:.1f} s, extrapolated from {share:.1%}")
    print(f"{boto3_seconds / min(cpu_seconds):.1f} × as long as ours")


def one_call() -> dict[str, Any]:
    """Return the arguments of one of the calls."""
    stat = {"Metric": {"Namespace": "n", "MetricName": "m"}, "Period": 60, "Stat": "Average"}
    queries = [{"Id": f"m{number}", "MetricStat": stat} for number in range(5)]
    return {"MetricDataQueries": queries, "StartTime": NOW - DAYS * 86400, "EndTime": NOW}


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def spread(seconds: list[float]) -> str:
    return f"{sorted(seconds)[len(seconds) // 2]:.1f} s ({min(seconds):.1f} to {max(seconds):.1f})"


# ------------------------------------------------------------------ the service


def serve(ready: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    ready.send(server.server_port)
    server.serve_forever()


class Handler(BaseHTTPRequestHandler):
    """Implements GetMetricData in AWS's JSON protocol, with different values for each metric."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["X-Amz-Target"].endswith("GetMetricData")
        times = list(range(int(request["StartTime"]), int(request["EndTime"]), 60))
        results = [
            {
                "Id": query["Id"],
                "Label": query["Id"],
                "StatusCode": "Complete",
                "Timestamps": [float(at) for at in times],
                "Values": [(at * (7 + number)) % 80_000 / 100 for at in times],
            }
            for number, query in enumerate(request["MetricDataQueries"])
        ]
        body = json.dumps({"MetricDataResults": results, "Messages": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


if __name__ == "__main__":
    main()
