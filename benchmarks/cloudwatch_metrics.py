"""A job's CloudWatch metrics, against boto3's own reading of the same answers.

A server on loopback answers GetMetricData in the protocol that botocore speaks with it: 14 days of
16 machines, five metrics each, a point a minute, 1.6 million in all. It runs in a process of its
own, so that what is printed of processor and memory is the reader's alone. boto3, with its own
parser of times, reads one of the calls; its seconds are scaled by the number of calls.

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
HOSTS = [f"algo-{number + 1}" for number in range(NODES)]


def main() -> None:
    """Read everything some times, and one call by boto3 alone."""
    ready, child = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(child,), daemon=True)
    server.start()
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ready.recv()}"
    session = boto3.Session("testing", "testing", region_name="us-east-1")
    before = memory()
    seconds, processor = [], []
    for _ in range(ROUNDS):
        started, worked = time.perf_counter(), time.process_time()
        found = instance_metrics(session, "job", HOSTS, NOW - DAYS * 86400, NOW, now=NOW)
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - worked)
    points = sum(one.times.size for one in found.values())
    assert points == DAYS * 1440 * NODES * 5, points
    print(f"{points / 1e6:.2f} million points, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds")
    print(
        f"ours   {spread(seconds)}, of the processor {spread(processor)}, "
        f"{memory() - before:.0f} MiB above {before:.0f}"
    )
    client = session.client("cloudwatch")
    worked = time.process_time()
    page = client.get_metric_data(**one_call())
    share = sum(len(one["Values"]) for one in page["MetricDataResults"]) / points
    theirs = (time.process_time() - worked) / share
    print(f"boto3  of the processor {theirs:.1f} s, from {share:.1%} of it")
    print(f"{theirs / min(processor):.1f} × as long as ours")


def one_call() -> dict[str, Any]:
    """One of the calls, as the service is asked."""
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
    """AWS's JSON protocol, with a value a minute that no two metrics share."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["X-Amz-Target"].endswith("GetMetricData")
        times = list(range(int(asked["StartTime"]), int(asked["EndTime"]), 60))
        results = [
            {
                "Id": query["Id"],
                "Label": query["Id"],
                "StatusCode": "Complete",
                "Timestamps": [float(at) for at in times],
                "Values": [(at * (7 + number)) % 80_000 / 100 for at in times],
            }
            for number, query in enumerate(asked["MetricDataQueries"])
        ]
        body = json.dumps({"MetricDataResults": results, "Messages": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-amz-json-1.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    main()
