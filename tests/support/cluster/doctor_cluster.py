"""Real doctor processes for tests: a cluster of one process per node, each with its own folders."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm_train.entrypoints.records.doctor_results import FOLDER, read_results
from sm_train.toolkit.submit.local.emulated_checkpoint_sync import CheckpointSync

from tests.support.cluster.training_jobs import PYTHON, Job, free_port, write_shards
from tests.support.deadline import DEADLINE


@dataclass
class DoctorCluster:
    """A cluster of ``nodes`` doctor processes.

    ``prefixes`` are put in front of each node's command, such as ``ip netns exec``. ``expected`` is
    that section of the job configuration. ``variables`` are added to single nodes' environments.
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
    missing_nodes: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.port = free_port()
        names = [f"algo-{node + 1}" for node in range(self.nodes)]
        if self.expected:
            path = self.job.bundle / "job.json"
            document = json.loads(path.read_text())
            document[self.job.config.stages[0].name]["expected"] = self.expected
            path.write_text(json.dumps(document))
        for node, name in enumerate(names):
            config = self.folder(node) / "input" / "config"
            config.mkdir(parents=True)
            resources = {
                "current_host": name,
                "hosts": names,
                "network_interface_name": self.interface,
            }
            if self.instance_type:
                resources["current_instance_type"] = self.instance_type
            (config / "resourceconfig.json").write_text(json.dumps(resources))
            write_shards(self.folder(node) / "input" / "data" / "train", shards=1, each=10)

    def folder(self, node: int) -> Path:
        return self.base / f"node-{node}"

    def start(self, node: int) -> subprocess.Popen[str]:
        """Start the process of ``node``."""
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
        command = [PYTHON, "-m", "sm_train.entrypoints.probes.worker"]
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

    def run(self, timeout: float = DEADLINE) -> tuple[dict[str, Any], str]:
        """Run all nodes; returns the stored result and the first node's output."""
        started = time.monotonic()
        folders = [self.folder(node) / "checkpoints" for node in range(self.nodes)]
        sync = CheckpointSync(self.base / "s3", folders)
        sync.start()
        processes = [
            self.start(node) for node in range(self.nodes) if node not in self.missing_nodes
        ]
        try:
            outputs = [
                process.communicate(timeout=timeout - (time.monotonic() - started))[0]
                for process in processes
            ]
        finally:
            for process in processes:
                process.kill()
            sync.finish()
        stored = read_results([self.base / "s3" / FOLDER])
        assert stored, outputs[0]
        return stored[-1], outputs[0]


def codes(result: dict[str, Any]) -> set[str]:
    """Return the codes of a result's findings."""
    return {finding["code"] for finding in result["verdict"]["findings"]}
