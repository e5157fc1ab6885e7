"""Runs a rank that HyperPod's elastic agent started, whose node learns its rank only then.

The first process of the node writes the cluster's description and the node's part of the data; the
others wait for it.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.clusters.cluster_variables import read_cluster
from sm_train.entrypoints.clusters.prepare import READY_PREFIX, create_channels, describe_cluster
from sm_train.entrypoints.job_interface.node_description import NODE_VARIABLE, NodeDescription

PREPARE_SECONDS = 3600.0
"""Longest time that the other ranks of a node wait: sharded data may be downloaded."""


def main() -> None:
    """Prepare the node or wait for it, then run the script in ``sys.argv[1:]``."""
    paths = SageMakerPaths.from_environment()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # A worker's parent is the agent.
    ready = paths.base / f"{READY_PREFIX}{os.getppid()}-{attempt}"
    if int(os.environ["LOCAL_RANK"]) == 0:
        description = NodeDescription.from_json(os.environ[NODE_VARIABLE])
        place = read_cluster(os.environ, description.nodes)
        describe_cluster(description, paths, place)
        for line in create_channels(description, paths, place, sharded=True):
            print(f"sm-train start: {line}", flush=True)
        ready.touch()
    else:
        _wait_for(ready)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + PREPARE_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the node's first process did not prepare it: no {file}")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
