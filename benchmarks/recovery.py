"""Seconds from the loss of a rank to the first new step, by part: on pods and on a real Slurm.

The platform's own queue is left out. The limit is 60 s and the restore. Parts: `detect` until the
first node reports it, `end` until all nodes have ended, `prepare` until the first process of the
new attempt has the node ready, `restore` until training has imported, built and restored its state,
and `first step`. Slurm needs root (tests/support/cluster/slurm_cluster.py).

    PYTHONPATH=. python benchmarks/recovery.py
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.clusters.node_record import read_nodes
from sm_train.entrypoints.storage.storage import Storage, open_storage
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.bundle.bundle import build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.manifests.manifest import build_manifest
from sm_train.toolkit.demo.digits import write_digits
from sm_train.toolkit.records.job_logs import Event, parse_events

from tests.support.cluster.demo_runs import demo_document
from tests.support.cluster.pods import BUCKET, PREFIX, cluster_with_shards, run_file
from tests.support.cluster.slurm_cluster import NODES, Slurm, keep_code, slurm_cluster
from tests.support.moto_server import moto_server

LIMIT_SECONDS = 60.0
DEADLINE_SECONDS = 300.0


@dataclass(frozen=True)
class Recovery:
    """Seconds of each part, and of the platform's queue, which is none of them."""

    detect: float
    end: float
    prepare: float
    restore: float
    first_step: float
    queue: float

    def report(self, where: str) -> None:
        parts = {name: value for name, value in vars(self).items() if name != "queue"}
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in parts.items())
        seconds, limit = sum(parts.values()), LIMIT_SECONDS + self.restore
        print(
            f"{where}: {seconds:.1f} s ({shown}), {seconds / limit:.2f} of the limit of "
            f"{limit:.1f} s; the platform's queue {self.queue:.1f} s",
            flush=True,
        )


def main() -> None:
    """Measure once on each."""
    with tempfile.TemporaryDirectory() as name:
        on_pods(Path(name)).report("pods (emulated), 2 nodes")
    with tempfile.TemporaryDirectory() as name:
        on_slurm(Path(name)).report("Slurm, 2 nodes")


def on_pods(folder: Path) -> Recovery:
    """Kill the ranks of one of two pods, and start both again as an operator does."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with moto_server() as aws, cluster_with_shards(folder, aws) as cluster:
        config = run_file(2, max_steps=100_000)
        os.environ.update(aws.environment)
        storage = open_storage(f"s3://{BUCKET}/{PREFIX}", S3Access(region="us-east-1"))
        first, second = cluster.start(config)
        first.wait_for('"step": 12')
        wait_for(lambda: any("step-" in name for name in storage.list_sizes("")))
        lost = time.time()
        second.kill_ranks()
        first.end(), second.end()
        again, other = cluster.start(config)
        again.wait_for('"kind": "step"')
        lines = [*first.lines, *second.lines, *again.lines, *other.lines]
        return recovery(lost, storage, lines)


def on_slurm(folder: Path) -> Recovery:
    """Kill the rank of a node of a real Slurm cluster; the batch script queues the job again."""
    write_digits(folder / "digits")
    pack = ["pack", str(folder / "digits"), str(folder / "packed"), "--shard-size", "240KB"]
    subprocess.run([sys.executable, "-m", "sm_train.toolkit", *pack], check=True)
    with slurm_cluster(folder / "cluster") as slurm:
        log, number = start_on_slurm(slurm, folder)
        shared = slurm.folder / "shared" / "digits" / "checkpoints" / "digits"
        wait_for(lambda: any(shared.glob("step-*/complete.json")))
        lost = time.time()
        for process in slurm.processes(NODES[1]):
            if b"--stage" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)
        slurm.start_soon(number)
        wait_for(lambda: newer_step(log, lost))
        found = recovery(lost, open_storage(str(shared), S3Access()), log.read_text().splitlines())
        slurm.run(f"scancel {number}")
        return found


def start_on_slurm(slurm: Slurm, folder: Path) -> tuple[Path, str]:
    """Start the demo's run on two nodes; return its log and its number."""
    document = demo_document(2, 100_000)
    # Nothing is installed: the nodes' Python has all packages.
    document["cluster"] |= {"image": "example.com/train:1", "network_isolation": True}
    document["slurm"] = {
        "shared_folder": str(slurm.folder / "shared"),
        "local_folder": str(slurm.folder / "disk"),
        "container": False,
        "python": sys.executable,
        "options": {"exclusive": False},
        "data": "shared",
        "data_folder": str(folder / "packed"),
        "data_s3": "s3://my-bucket/digits/",
    }
    config = RunConfig.model_validate(document)
    bundle = build_bundle(config, None)
    manifest = build_manifest(
        config, config.stages[0], "slurm", bundle, region="us-east-1", file=None
    )
    keep_code(slurm.folder / "shared" / config.name, bundle)
    (slurm.folder / f"{manifest.name}.sbatch").write_text(manifest.text)
    number = slurm.run(manifest.commands["start"]).rpartition(" ")[2]
    return slurm.folder / "shared/digits/logs" / f"{manifest.name}-{number}.log", number


def newer_step(log: Path, since: float) -> bool:
    """Return whether an attempt that began after a time has taken a step."""
    events = events_of(log.read_text().splitlines())
    begins = [event["time"] for event in events if event["kind"] == "start"]
    return max(begins, default=0.0) > since and any(
        event["kind"] == "step" and event["time"] > max(begins) for event in events
    )


def events_of(lines: Sequence[str]) -> list[Event]:
    return list(parse_events(re.sub(r"^\d+: ", "", line) for line in lines))


def recovery(lost: float, storage: Storage, lines: Sequence[str]) -> Recovery:
    """Return the parts, by the times in events and records after the loss at ``lost``."""
    records = [node.record for node in read_nodes(storage)]
    first = [record for record in records if record.started < lost]
    started = max(record.started for record in records if record not in first)
    events = events_of(lines)
    reports = (e["time"] for e in events if e["kind"] in ("warning", "error"))
    died = min(time for time in reports if time > lost)
    ended = max(record.seen for record in first)
    prepared = [
        int(found[1]) for line in lines if (found := re.search(r"prepared in (\d+) s", line))
    ]
    begin = next(e["time"] for e in events if e["kind"] == "start" and e["time"] > started)
    step = next(e["time"] for e in events if e["kind"] == "step" and e["time"] > begin)
    return Recovery(
        detect=died - lost,
        end=ended - died,
        prepare=float(prepared[-1]),
        restore=begin - started - prepared[-1],
        first_step=step - begin,
        queue=started - ended,
    )


def wait_for(is_done: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_done():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.2)


if __name__ == "__main__":
    main()
