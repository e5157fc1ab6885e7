"""Chooses the library that sums gradients over this job's processes, and gives the reason.

:func:`choose` is a pure function of the environment; :func:`join` creates the process group.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A collective that takes longer fails: a peer is dead. The job ends and can be retried."""

# The second variable is needed before aws-ofi-nccl 1.7 and harmless later
# (awsome-distributed-training, 1.architectures/efa-cheatsheet.md).
_EFA_ENVIRONMENT = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}


@dataclass(frozen=True)
class BackendChoice:
    """A torch.distributed backend ("none" for a single process) and its environment variables."""

    backend: str
    reason: str
    environment: dict[str, str] = field(default_factory=dict)


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
    """Return the backend for ``processes`` in total on ``nodes`` with ``gpus`` each.

    ``backend`` is the run file's wish: auto, nccl or smddp. ``efa`` is true if the node has an EFA
    device, ``mpi`` if MPI started the processes: SMDDP sums gradients only under its own launcher,
    which is MPI's.

    Raises:
        ValueError: the run file requires SMDDP where it cannot run.
    """
    if processes == 1:
        return BackendChoice("none", "a single process")
    if gpus == 0:
        return BackendChoice("gloo", "no GPU")
    a100 = (instance_type or "").startswith(("ml.p4d.", "ml.p4de."))
    if nodes > 1 and backend != "nccl" and a100 and smddp_installed and mpi:
        return BackendChoice("smddp", f"{instance_type} × {nodes} with SMDDP in the image")
    if backend == "smddp" and nodes > 1:
        obstacle = (
            "smddprun did not start the processes"
            if smddp_installed
            else "the image does not contain it"
        )
        if not a100:
            obstacle = f"{instance_type} is not a p4d or p4de"
        raise ValueError(f"backend: smddp cannot run: {obstacle}; use backend: nccl")
    if nodes == 1:
        return BackendChoice("nccl", "one node: NCCL over NVLink or PCIe")
    if not efa:
        return BackendChoice(
            "nccl", "no EFA device: NCCL over sockets, which is slow between nodes"
        )
    return BackendChoice("nccl", "NCCL over EFA", _EFA_ENVIRONMENT)


def decide(*, nodes: int, backend: str, instance_type: str | None) -> BackendChoice:
    """Call :func:`choose` for this process, from its environment and devices."""
    import torch

    return choose(
        instance_type=instance_type or os.environ.get("SM_CURRENT_INSTANCE_TYPE"),
        nodes=nodes,
        processes=int(os.environ.get("WORLD_SIZE", "1")),
        gpus=0 if _uses_cpu() else torch.cuda.device_count(),
        backend=backend,
        smddp_installed=importlib.util.find_spec("smdistributed") is not None,
        efa=os.path.isdir("/sys/class/infiniband"),  # noqa: PTH112
        mpi="OMPI_COMM_WORLD_SIZE" in os.environ,
    )


def _uses_cpu() -> bool:
    """Return whether Accelerate is configured to ignore the GPUs."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def adopt_mpi_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Set torch.distributed's rank variables from MPI's, which smddprun's processes have."""
    names = {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    }
    for name, mpi_name in names.items():
        if mpi_name in environment:
            os.environ.setdefault(name, environment[mpi_name])


def join(choice: BackendChoice) -> None:
    """Create the process group of ``choice``; Accelerate uses an existing group.

    Variables that the run file sets in ``cluster.environment`` take precedence.
    """
    if choice.backend == "none":
        return
    import torch
    import torch.distributed as dist

    for name, value in choice.environment.items():
        os.environ.setdefault(name, value)
    if choice.backend == "smddp":
        import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401  registers the backend
    if choice.backend != "gloo":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend=choice.backend, timeout=COLLECTIVE_TIMEOUT)
