"""What a pod or a Slurm task needs to know to build a training job's folders, as one variable.

SageMaker mounts channels, splits them over the instances, copies checkpoints and describes the
cluster in files. On Kubernetes and Slurm, the start script of each node does that
(:mod:`sm_train.entrypoints.launcher`), from this description, which the manifest contains.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths

NODE_VARIABLE = "SM_TRAIN_NODE"
"""Environment variable with the JSON of a :class:`NodeDescription`."""


TORCHRUN, HYPERPODRUN = "torchrun", "hyperpodrun"
"""Launchers of a node's processes: HyperPod's operator requires its own in place of torchrun."""

LAUNCHER_VARIABLE = "SM_TRAIN_LAUNCHER"

MACHINE_VARIABLE = "SM_TRAIN_MACHINE"
"""Environment variable with the name of the machine under a pod: Kubernetes' name of its node."""

JOB_VARIABLE = "SM_TRAIN_JOB_ID"
"""Environment variable with the number of a pod's job, which a pod that starts again keeps."""

FAILED_AFTER_PROGRESS = 75
"""Exit code of a node whose job failed after it stored a checkpoint: EX_TEMPFAIL of sysexits.h.
A manifest does not count the restart after it."""

UNFIT_CLUSTER = 69
"""Exit code of a node whose doctor found the cluster unfit: EX_UNAVAILABLE of sysexits.h. Other
nodes may be fit."""

NOT_SAVED = 74
"""Exit code of a node whose last checkpoint could not be written or stored: EX_IOERR of sysexits.h.
A manifest lets no platform start it again, which would only repeat that."""

STOPPED = 128 + signal.SIGTERM
"""Exit code of a node that SIGTERM has stopped, after its checkpoint: a platform starts it again,
while with 0 it would take the stage for finished."""

RECORDS = "job-records"
"""Folder in a stage's checkpoint folder of what its nodes store about themselves."""

FLAGGED = f"{RECORDS}/flagged-nodes"
"""File in a stage's checkpoint folder with the machines that the doctor found unfit, one a line."""

Platform = Literal["sagemaker", "kubernetes", "slurm"]
"""What runs a job, and starts it again."""


@dataclass(frozen=True)
class NodeChannel:
    """One input channel.

    ``path`` is the mounted file or folder that holds ``uri``; None downloads it. With ``sharded``,
    each node gets a part of the files, as by SageMaker's ShardedByS3Key.
    """

    name: str
    uri: str
    path: str | None = None
    sharded: bool = False


@dataclass(frozen=True)
class NodeDescription:
    """One stage of a run, the same on all of its nodes.

    ``entry`` is the bundle's script. ``checkpoints`` is a folder that all nodes share, or the S3
    prefix to which each node copies its own. ``launcher`` starts the processes of a node.
    ``commands`` are the platform's, by their purpose (status, stop, resume), for alerts. With
    ``take_over`` the job continues from checkpoints that another platform wrote.
    """

    stage: str
    entry: str
    instance_type: str
    nodes: int
    processes: int
    channels: tuple[NodeChannel, ...]
    checkpoints: str
    launcher: str = TORCHRUN
    platform: Platform = "kubernetes"
    commands: Mapping[str, str] = field(default_factory=dict)
    take_over: bool = False

    def to_json(self) -> str:
        """Return the value of :data:`NODE_VARIABLE`, on one line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> NodeDescription:
        """Parse the value of :data:`NODE_VARIABLE`."""
        document = json.loads(text)
        channels = tuple(NodeChannel(**channel) for channel in document.pop("channels"))
        return cls(**document, channels=channels)

    @property
    def syncs_checkpoints(self) -> bool:
        """Return whether each node has its own checkpoint folder, which is copied to S3."""
        return self.checkpoints.startswith("s3://")


def node_description() -> NodeDescription | None:
    """Return the description of this node; None in a SageMaker job, and on a laptop."""
    text = os.environ.get(NODE_VARIABLE)
    return None if text is None else NodeDescription.from_json(text)


def machine_name() -> str | None:
    """Return the name by which an administrator knows this machine: that of a node of Kubernetes
    or Slurm, None elsewhere.
    """
    return os.environ.get(MACHINE_VARIABLE) or os.environ.get("SLURMD_NODENAME")


def job_number() -> str | None:
    """Return the platform's number of this job; None if the platform provides none."""
    return os.environ.get(JOB_VARIABLE) or os.environ.get("SLURM_JOB_ID")


def current_platform() -> Platform | None:
    """Return the platform that runs this process; None if it was started by hand."""
    description = node_description()
    if description is not None:
        return description.platform
    return "sagemaker" if "TRAINING_JOB_NAME" in os.environ else None


def uploads_checkpoints(paths: SageMakerPaths) -> bool:
    """Return whether this node's checkpoint folder is copied to storage, which leaves notes.

    SageMaker and local runs copy it, and so does the start script where nodes share no folder.
    Nothing copies it in a job that was started by hand.
    """
    description = node_description()
    if description is not None:
        return description.syncs_checkpoints
    return paths.resources.exists()
