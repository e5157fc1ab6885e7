"""Builds the folders and files of a SageMaker training job on a node of another cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.clusters.channels import create_channel
from sm_train.entrypoints.clusters.cluster_variables import ClusterPlace
from sm_train.entrypoints.job_interface.node_description import NodeDescription

READY_PREFIX = "node-ready-"
"""Prefix of the files that elastic_worker.py creates. A restarted container has those of the last
one."""


class PreparationError(RuntimeError):
    """The node cannot start; the message is one line."""


def create_folders(description: NodeDescription, paths: SageMakerPaths) -> None:
    """Create what does not depend on the node's rank."""
    for folder in (paths.model, paths.output_data, paths.input_config):
        folder.mkdir(parents=True, exist_ok=True)
    paths.stop_request.unlink(missing_ok=True)
    paths.failure.unlink(missing_ok=True)
    for ready in paths.base.glob(f"{READY_PREFIX}*"):
        ready.unlink()
    if description.syncs_checkpoints:
        paths.checkpoints.mkdir(exist_ok=True)
    else:
        shared = Path(description.checkpoints)
        shared.mkdir(parents=True, exist_ok=True)
        # Of an earlier attempt, for which the run file named another folder.
        if paths.checkpoints.is_symlink() and paths.checkpoints.readlink() != shared:
            paths.checkpoints.unlink()
        if not paths.checkpoints.is_symlink():
            paths.checkpoints.symlink_to(shared)
    # The request of a training job has the same.
    parameters = json.dumps({"stage": description.stage})
    (paths.input_config / "hyperparameters.json").write_text(parameters, encoding="utf-8")


def create_channels(
    description: NodeDescription, paths: SageMakerPaths, place: ClusterPlace, *, sharded: bool
) -> list[str]:
    """Create the channels that are ``sharded``, or those that are not; returns a line for each.

    Raises:
        ChannelError: a channel has no files.
    """
    lines = []
    for channel in description.channels:
        if channel.sharded == sharded:
            folder = paths.channel(channel.name)
            files = create_channel(channel, folder, place.node_rank, len(place.hosts))
            source = channel.path or f"copied from {channel.uri}"
            share = f", part {place.node_rank + 1} of {len(place.hosts)}" if sharded else ""
            lines.append(f"channel {channel.name}: {files} files{share} ({source})")
    return lines


def describe_cluster(
    description: NodeDescription, paths: SageMakerPaths, place: ClusterPlace
) -> None:
    """Write the cluster's description, which every process reads."""
    resources = ResourceConfig(place.current_host, place.hosts, description.instance_type)
    resources.write(paths)


def launch_environment(description: NodeDescription, place: ClusterPlace) -> Mapping[str, str]:
    """Return the variables that the SDK's start script sets for the launcher."""
    return {
        "SM_NUM_GPUS": str(description.processes),
        "SM_HOST_COUNT": str(len(place.hosts)),
        "SM_CURRENT_HOST_RANK": str(place.node_rank),
        "SM_CURRENT_INSTANCE_TYPE": description.instance_type,
        "SM_MASTER_ADDR": place.master_addr,
        "SM_MASTER_PORT": str(place.master_port),
    }
