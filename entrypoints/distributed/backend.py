"""Which library sums gradients over this job's processes, and why.

The decision is a pure function of what is there; :func:`join` carries it out.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A peer that is silent for this long is dead: the job fails and can be retried."""

# The second is needed before aws-ofi-nccl 1.7 and does no harm later (awsome-distributed-training,
# 1.architectures/efa-cheatsheet.md).
_OVER_EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}


@dataclass(frozen=True)
class BackendChoice:
    """A backend of torch.distributed (none for a single process) and what to set first."""

    backend: str
    reason: str
    set_variables: dict[str, str] = field(default_factory=dict)


def choose(
    *,
    instance_type: str | None,
    nodes: int,
    processes: int,
    gpus: int,
    backend: str,
    smddp_installed: bool,
    efa: bool,
    mpi: bool,
) -> BackendChoice:
    """The backend for ``processes`` on ``nodes`` machines with ``gpus`` each.

    ``efa`` says whether the machine has an EFA device, ``mpi`` whether MPI started the processes:
    SMDDP sums gradients only under its own launcher, which is MPI's.

    Raises:
        ValueError: the run asks for SMDDP where it cannot run.
    """
    if processes == 1:
        return BackendChoice("none", "a single process")
    if gpus == 0:
        return BackendChoice("gloo", "no GPU")
    a100 = (instance_type or "").startswith(("ml.p4d.", "ml.p4de."))
    if nodes > 1 and backend != "nccl" and a100 and smddp_installed and mpi:
        return BackendChoice("smddp", f"{instance_type} × {nodes} with SMDDP in the image")
    if backend == "smddp" and nodes > 1:
        missing = "smddprun did not start it" if smddp_installed else "the image does not carry it"
        if not a100:
            missing = f"{instance_type} is no p4d or p4de"
        raise ValueError(f"backend: smddp cannot run: {missing}; nccl would")
    if nodes == 1:
        return BackendChoice("nccl", "one node: NCCL over NVLink or PCIe")
    if not efa:
        return BackendChoice(
            "nccl", "no EFA device: NCCL over sockets, which is slow between nodes"
        )
    return BackendChoice("nccl", "NCCL over EFA", _OVER_EFA)


def decide(*, nodes: int, backend: str, instance_type: str | None) -> BackendChoice:
    """:func:`choose` for this process, from its environment and its machine."""
    import torch

    return choose(
        instance_type=instance_type or os.environ.get("SM_CURRENT_INSTANCE_TYPE"),
        nodes=nodes,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        gpus=0 if _cpu_asked_for() else torch.cuda.device_count(),
        backend=backend,
        smddp_installed=importlib.util.find_spec("smdistributed") is not None,
        efa=os.path.isdir("/sys/class/infiniband"),  # noqa: PTH112
        mpi="OMPI_COMM_WORLD_SIZE" in os.environ,
    )


def _cpu_asked_for() -> bool:
    """Whether Accelerate was told to leave the GPUs alone."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def adopt_mpi_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Processes that smddprun starts through MPI know their rank under MPI's names."""
    names = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    for name, mpi in names.items():
        if mpi in environment:
            os.environ.setdefault(name, environment[mpi])


def join(choice: BackendChoice) -> None:
    """Make the process group of ``choice``; Accelerate takes over a group that is there.

    What the run file sets in ``cluster.environment`` stays as it is.
    """
    if choice.backend == "none":
        return
    import torch
    import torch.distributed as dist

    for name, value in choice.set_variables.items():
        os.environ.setdefault(name, value)
    if choice.backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers the backend
    if choice.backend != "gloo":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend=choice.backend, timeout=COLLECTIVE_TIMEOUT)
