"""Starts a node's training processes with torchrun, once all nodes are up.

It replaces the SDK's torchrun driver (sagemaker 3.27), which sets NCCL_PROTO=simple and
RDMAV_FORK_SAFE. Current EFA plugins want neither (aws-ofi-nccl's README: the first was for plugins
up to 1.5.0), and inside a node the first disables NCCL's fast protocols for small messages.

A stop does not pass through here: the container's first process turns SIGTERM into a file that the
ranks look for. torchrun would fail however well its workers end, and kill them at a second SIGTERM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from sm_train.entrypoints.base.digests import message_key
from sm_train.entrypoints.base.pip_install import PackageInstallError, install_user_packages
from sm_train.entrypoints.base.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.distributed.cuda_compat import cuda_compat
from sm_train.entrypoints.distributed.messages import (
    ForgedMessageError,
    MissingNodeError,
    use_job_key,
)
from sm_train.entrypoints.distributed.rendezvous import RendezvousAddress, join, wait_for_nodes
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JOB_FILE
from sm_train.entrypoints.job_interface.node_description import HYPERPODRUN, LAUNCHER_VARIABLE
from sm_train.entrypoints.monitoring.start_monitoring import wait_for_watchdog


def hyperparameters(paths: SageMakerPaths) -> list[str]:
    """Return the job's hyperparameters, which are strings, as command-line arguments."""
    values = json.loads((paths.input_config / "hyperparameters.json").read_text(encoding="utf-8"))
    return [argument for key, value in values.items() for argument in (f"--{key}", str(value))]


def torchrun(environment: Mapping[str, str], script: list[str]) -> list[str]:
    """Return the command that starts ``script`` (with its arguments) on this node.

    ``environment`` holds the variables that the SDK's start script sets.
    """
    # A node without GPUs runs one process.
    processes = f"--nproc_per_node={int(environment.get('SM_NUM_GPUS') or 0) or 1}"
    nodes = int(environment.get("SM_HOST_COUNT") or 1)
    if environment.get(LAUNCHER_VARIABLE) == HYPERPODRUN:
        return _hyperpodrun(processes, nodes, script)
    command = [sys.executable, "-m", "torch.distributed.run", processes]
    if nodes == 1:
        return [*command, "--standalone", *script]
    return [
        *command,
        f"--nnodes={nodes}",
        f"--node_rank={environment['SM_CURRENT_HOST_RANK']}",
        f"--master_addr={environment['SM_MASTER_ADDR']}",
        f"--master_port={environment['SM_MASTER_PORT']}",
        *script,
    ]


def _hyperpodrun(processes: str, nodes: int, script: list[str]) -> list[str]:
    """Return the command of HyperPod's elastic agent, to which its operator sends rank and address.

    The agent otherwise kills a stopped job's ranks at once (hyperpod-elastic-agent 1.1.3, run.py).
    """
    return [
        HYPERPODRUN,
        f"--nnodes={nodes}",
        processes,
        "--rdzv-backend=hyperpod",
        "--shutdown-signal=SIGTERM",
        "--shutdown-timeout=100",
        "-m",
        "sm_train.entrypoints.clusters.elastic_worker",
        *script,
    ]


def rendezvous(environment: Mapping[str, str], paths: SageMakerPaths) -> None:
    """Wait until all nodes of the job are up.

    Raises:
        MissingNodeError: a node is missing; the log and the job's failure reason name it.
        ForgedMessageError: another host writes to the nodes' store.
    """
    resources = ResourceConfig.read(paths)
    if len(resources.hosts) == 1:
        return
    # torchrun itself uses the port afterwards.
    first = RendezvousAddress(environment["SM_MASTER_ADDR"], int(environment["SM_MASTER_PORT"]) + 1)
    events = EventLog(node=resources.node_rank, rank=0)
    try:
        if resources.node_rank == 0:
            wait_for_nodes(resources.hosts, first.port, lambda text: events.warn("node-late", text))
        else:
            join(resources.current_host, first)
    except (ForgedMessageError, MissingNodeError) as error:
        _report_failure(events, "node-missing", error, paths)
        raise


def _report_failure(events: EventLog, code: str, error: Exception, paths: SageMakerPaths) -> None:
    """Log the cause as an event, and write the job's failure reason unless it has one."""
    events.write("error", str(error), code=code, message=str(error))
    paths.write_failure(f"{error}\n")


def main(arguments: list[str]) -> int:
    """Run the script ``arguments`` with its hyperparameters by torchrun; returns its exit code."""
    network = os.environ.get("SM_NETWORK_INTERFACE_NAME")
    if network:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", network)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network)
    document = Path(arguments[0]).parent / JOB_FILE
    if document.exists():
        use_job_key(message_key(document))
    paths = SageMakerPaths.from_environment()
    events = EventLog(node=ResourceConfig.read(paths).node_rank, rank=0)
    try:
        rendezvous(os.environ, paths)
        install_user_packages()
    except (ForgedMessageError, MissingNodeError):
        return 1
    except PackageInstallError as error:
        _report_failure(events, "packages-missing", error, paths)
        return 1
    if compat := cuda_compat(os.environ):
        os.environ.update(compat.environment)
        events.warn("cuda-compat", compat.message)
    process = subprocess.Popen(torchrun(os.environ, [*arguments, *hyperparameters(paths)]))
    code = process.wait()
    wait_for_watchdog(process.pid)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
