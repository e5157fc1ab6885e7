"""Starts a machine's processes by torchrun, and hands SIGTERM on to them.

SageMaker sends its SIGTERM (a stop, a spot interruption, the longest run time) to the container's
first process. Under the SDK's start script that would be a shell, which the kernel shields from
signals that it does not handle: training would be killed two minutes later without having heard of
the stop. So this program is the script's last command, in the shell's place.

It also stands for the SDK's own torchrun driver (sagemaker 3.27), which sets NCCL_PROTO=simple and
RDMAV_FORK_SAFE; current EFA plugins want neither (aws-ofi-nccl's README: the first was for plugins
up to 1.5.0), and inside a node the first forbids NCCL its fast protocols for small messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
from sm_train.entrypoints.common.events import EventLog
from sm_train.entrypoints.common.sagemaker_paths import ResourceConfig, SageMakerPaths
from sm_train.entrypoints.distributed.rendezvous import (
    MissingNodeError,
    RendezvousAddress,
    join,
    wait_for_nodes,
)

_HYPERPARAMETERS = Path("/opt/ml/input/config/hyperparameters.json")
"""Where SageMaker leaves the request's, as they are: texts."""


def hyperparameters(path: Path = _HYPERPARAMETERS) -> list[str]:
    """The job's hyperparameters as a script's arguments."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return [word for key, value in told.items() for word in (f"--{key}", str(value))]


def torchrun(environment: Mapping[str, str], script: list[str]) -> list[str]:
    """The command that starts ``script`` (with its arguments) on this machine of the job.

    ``environment`` is what the SDK's start script says of the machines.
    """
    command = [sys.executable, "-m", "torch.distributed.run"]
    # A machine without a GPU has one process.
    command.append(f"--nproc_per_node={int(environment.get('SM_NUM_GPUS') or 0) or 1}")
    nodes = int(environment.get("SM_HOST_COUNT") or 1)
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


def meet(environment: Mapping[str, str], directories: SageMakerPaths) -> None:
    """Wait until all machines of the job are there.

    Raises:
        AbsentError: one is not; it is named, also in the job's failure reason.
    """
    hosts = ResourceConfig.read(directories)
    if len(hosts.hosts) == 1:
        return
    # torchrun takes the port itself afterwards.
    first = RendezvousAddress(environment["SM_MASTER_ADDR"], int(environment["SM_MASTER_PORT"]) + 1)
    events = EventLog(node=hosts.node_rank, rank=0)
    try:
        if hosts.node_rank == 0:
            wait_for_nodes(
                hosts.hosts, first.port, lambda words: events.warn("machine-late", words)
            )
        else:
            join(hosts.current_host, first)
    except MissingNodeError as error:
        events.write("error", str(error), code="machine-absent", message=str(error))
        directories.failure.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), directories.failure.open("x") as file:
            file.write(f"{error}\n")
        raise


def main(arguments: list[str]) -> int:
    """Run the script ``arguments`` with its hyperparameters by torchrun; returns its exit code."""
    network = os.environ.get("SM_NETWORK_INTERFACE_NAME")
    if network:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", network)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network)
    try:
        meet(os.environ, SageMakerPaths.from_environment())
    except MissingNodeError:
        return 1
    process = subprocess.Popen(torchrun(os.environ, [*arguments, *hyperparameters()]))
    signal.signal(signal.SIGTERM, lambda *_: hand_on(process.pid))
    return process.wait()


def hand_on(launcher: int) -> None:
    """Send SIGTERM to the processes that ``launcher`` started, and to itself if there are none yet.

    torchrun would do that by itself, but fail then however well they end, and a second SIGTERM
    would make it kill them in the middle of a checkpoint.
    """
    workers = psutil.Process(launcher).children()
    for one in workers or [psutil.Process(launcher)]:
        one.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
