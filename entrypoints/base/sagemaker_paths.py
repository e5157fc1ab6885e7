"""Paths and cluster description of a SageMaker training job.

The tree is the platform's contract (``/opt/ml`` by default). ``SAGEMAKER_BASE_DIR`` moves it as a
whole, as in the container toolkit's own tests and in our local runs.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from sm_train.entrypoints.base.atomic_write import write_atomic

STOP_REQUEST = "stop-requested"
"""Name of the file below ``/opt/ml`` that asks every rank of the node to checkpoint and exit."""


_RESOURCE_FILE = "resourceconfig.json"

IN_RANK_ORDER = "in_rank_order"
"""Key of a resource file that this toolkit wrote: its hosts are not to be sorted."""


def host_names(nodes: int) -> list[str]:
    """Return the names that SageMaker gives a job's nodes, in rank order.

    AWS sorts them as text, so with ten nodes or more algo-10 has rank 1.
    """
    return sorted(f"algo-{number}" for number in range(1, nodes + 1))


def host_name(node_rank: int, nodes: int) -> str:
    """Return one of :func:`host_names`; without ``nodes`` (0), as if there were fewer than ten."""
    return host_names(nodes)[node_rank] if node_rank < nodes else f"algo-{node_rank + 1}"


@dataclass(frozen=True)
class SageMakerPaths:
    """The job's directory tree below ``base``."""

    base: Path

    @classmethod
    def from_environment(cls) -> SageMakerPaths:
        return cls(Path(os.environ.get("SAGEMAKER_BASE_DIR", "/opt/ml")))

    def channel(self, name: str) -> Path:
        """Return the folder in which the input channel ``name`` appears."""
        return self.base / "input" / "data" / name

    @property
    def input_config(self) -> Path:
        return self.base / "input" / "config"

    @property
    def resources(self) -> Path:
        """The platform's file that describes the cluster."""
        return self.input_config / _RESOURCE_FILE

    @property
    def checkpoints(self) -> Path:
        """Continuously copied to CheckpointConfig.S3Uri, and from there on a restart."""
        return self.base / "checkpoints"

    @property
    def model(self) -> Path:
        """Uploaded to S3 when the job succeeds."""
        return self.base / "model"

    @property
    def output_data(self) -> Path:
        return self.base / "output" / "data"

    @property
    def stop_request(self) -> Path:
        """The file that the container's first process creates when it gets SIGTERM."""
        return self.base / STOP_REQUEST

    @property
    def failure(self) -> Path:
        """The file whose first 1,024 characters become the job's FailureReason."""
        return self.base / "output" / "failure"

    def write_failure(self, reason: str) -> None:
        """Write the job's FailureReason, unless another process of the node already has."""
        self.failure.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), self.failure.open("x") as file:
            file.write(reason)


@dataclass(frozen=True)
class ResourceConfig:
    """The job's instances by host name, as in ``resourceconfig.json``, in rank order.

    ``instance_type`` is None if the platform does not name it, as on a laptop.
    """

    current_host: str
    hosts: tuple[str, ...]
    instance_type: str | None = None

    @classmethod
    def read(cls, paths: SageMakerPaths) -> ResourceConfig:
        """Read the platform's file; without one return a single host called ``algo-1``."""
        path = paths.resources
        if not path.exists():
            return cls("algo-1", ("algo-1",))
        document = json.loads(path.read_text(encoding="utf-8"))
        hosts = document["hosts"]
        if not document.get(IN_RANK_ORDER):
            # AWS sorts them, and its own launchers sort them again: every node must agree on ranks.
            hosts = sorted(hosts)
        return cls(document["current_host"], tuple(hosts), document.get("current_instance_type"))

    def write(self, paths: SageMakerPaths) -> None:
        """Write the file where the platform does not: on Kubernetes and Slurm."""
        paths.input_config.mkdir(parents=True, exist_ok=True)
        document = {
            "current_host": self.current_host,
            "hosts": self.hosts,
            "current_instance_type": self.instance_type,
            IN_RANK_ORDER: True,
        }
        path = paths.resources
        write_atomic(path, json.dumps(document).encode())

    @property
    def node_rank(self) -> int:
        return self.hosts.index(self.current_host)


def stays_below(name: str) -> bool:
    """Return whether a file of this relative name lies below the folder that it is written to.

    S3 accepts any text as a key, and whoever may write to a bucket chooses it.
    """
    return not name.startswith("/") and ".." not in name.split("/") and "\0" not in name
