"""Real doctor processes for tests: a cluster of one process a node, each with its own folders."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm_train.entrypoints.doctor.history import FOLDER, results

from tests.support.cluster.training_jobs import PYTHON, Job, free_port, write_shards


@dataclass
class Cluster:
    """``prefixes`` are what each node's command begins with, such as ``ip netns exec``.

    ``expected`` is the job configuration's section, ``variables`` are one node's own.
    """

    base: Path
    job: Job
    nodes: int
    master: str = "127.0.0.1"
    prefixes: Sequence[Sequence[str]] = ()
    interface: str = "lo"
    instance_type: str | None = None
    expected: dict[str, Any] | None = None
    variables: Mapping[int, dict[str, str]] = field(default_factory=dict)
    absent: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.port = free_port()
        hosts = [f"algo-{node + 1}" for node in range(self.nodes)]
        if self.expected:
            job_file = self.job.bundle / "job.json"
            document = json.loads(job_file.read_text())
            document[self.job.config.stages[0].name]["expected"] = self.expected
            job_file.write_text(json.dumps(document))
        checkpoints = self.base / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        for node, host in enumerate(hosts):
            folder = self.folder(node)
            (folder / "input" / "config").mkdir(parents=True)
            (folder / "input" / "config" / "resourceconfig.json").write_text(
                json.dumps(
                    {
                        "current_host": host,
                        "hosts": hosts,
                        "network_interface_name": self.interface,
                    }
                    | ({"current_instance_type": self.instance_type} if self.instance_type else {})
                )
            )
            write_shards(folder / "input" / "data" / "train", shards=1, each=10)
            (folder / "checkpoints").symlink_to(checkpoints)

    def folder(self, node: int) -> Path:
        return self.base / f"node-{node}"

    def start(self, node: int) -> subprocess.Popen[str]:
        prefix = self.prefixes[node] if self.prefixes else ()
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.job.bundle),
            "SAGEMAKER_BASE_DIR": str(self.folder(node)),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "FATAL",
            "RANK": str(node),
            "WORLD_SIZE": str(self.nodes),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
            **self.variables.get(node, {}),
        }
        command = [PYTHON, "-m", "sm_train.entrypoints.doctor.worker"]
        command += ["--document", str(self.job.bundle / "job.json")]
        command += ["--stage", self.job.config.stages[0].name]
        command += ["--verdict", str(self.verdict(node))]
        return subprocess.Popen(
            [*prefix, *command],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def verdict(self, node: int) -> Path:
        return self.folder(node) / "verdict.json"

    def run(self, timeout: float = 150) -> tuple[dict[str, Any], str]:
        """The result that was kept, and what the first node printed."""
        started = time.monotonic()
        running = [self.start(node) for node in range(self.nodes) if node not in self.absent]
        try:
            texts = [
                one.communicate(timeout=timeout - (time.monotonic() - started))[0]
                for one in running
            ]
        finally:
            for one in running:
                one.kill()
        kept = results([self.base / "checkpoints" / FOLDER])
        assert kept, texts[0]
        return kept[-1], texts[0]


def codes(result: dict[str, Any]) -> set[str]:
    return {one["code"] for one in result["verdict"]["findings"]}
