"""Chooses the library that sums gradients over this job's processes, and gives the reason.

:func:`choose` is a pure function of the environment; :func:`join` creates the process group.

No variable is set for EFA. The NCCL plugin of AWS's images selects the provider (aws-ofi-nccl), and
libfabric knows whether a device can do RDMA reads: with FI_EFA_USE_DEVICE_RDMA=1 it aborts on one
that cannot (ofiwg/libfabric pull request 8661), such as those of G5 and G6e instances.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm_train.entrypoints.distributed.object_exchange import COLLECTIVE_TIMEOUT

_INFINIBAND_DEVICES = Path("/sys/class/infiniband")
_EFA_DEVICE = re.compile(r"efa_\d+|rdmap\d+s\d+")
"""Names of EFA devices, before and after rdma-core renames them by their PCI address
(rdma-core, kernel-boot/rdma_rename.c)."""


@dataclass(frozen=True)
class BackendChoice:
    """A torch.distributed backend ("none" for a single process).

    ``warning`` says why it is not the one that the run file requests.
    """

    backend: str
    reason: str
    warning: str | None = None


def choose(
    *,
    instance_type: str | None,
    nodes: int,
    processes: int,
    gpus: int,
    backend: str,
    smddp_installed: bool,
    rdma: Sequence[str],
    mpi: bool,
) -> BackendChoice:
    """Return the backend for ``processes`` in total on ``nodes`` with ``gpus`` each.

    ``backend`` is the run file's wish; ``auto`` is NCCL. ``rdma`` are the node's
    :func:`rdma_devices`. ``mpi`` is true if MPI started the processes: SMDDP sums gradients only
    under its own launcher, which is MPI's. Where a requested SMDDP cannot run, the choice is NCCL
    with a warning.
    """
    if processes == 1:
        return BackendChoice("none", "a single process")
    if gpus == 0:
        return BackendChoice("gloo", "no GPU")
    if nodes == 1:
        return BackendChoice("nccl", "one node: NCCL over NVLink or PCIe")
    nccl = BackendChoice("nccl", _nccl_reason(rdma))
    if backend != "smddp":
        return nccl
    if not (instance_type or "").startswith(("ml.p4d.", "ml.p4de.")):
        obstacle = f"{instance_type} is not a p4d or p4de"
    elif not smddp_installed:
        obstacle = "the image does not contain it"
    elif not mpi:
        obstacle = "smddprun did not start the processes"
    else:
        return BackendChoice("smddp", f"{instance_type} × {nodes} with SMDDP in the image")
    return replace(nccl, warning=f"SMDDP is not used: {obstacle}; NCCL is used instead")


def _nccl_reason(rdma: Sequence[str]) -> str:
    if any(map(is_efa, rdma)):
        return "NCCL over EFA"
    if rdma:
        return f"NCCL over {', '.join(rdma)}"
    return "no RDMA device: NCCL over sockets, which is slow"


def gpu_name() -> str | None:
    """Return the name of this process's GPU; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


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
        rdma=rdma_devices(),
        mpi="OMPI_COMM_WORLD_SIZE" in os.environ,
    )


def is_efa(device: str) -> bool:
    """Return whether ``device`` is the name of an EFA device."""
    return _EFA_DEVICE.fullmatch(device) is not None


def rdma_devices(folder: Path = _INFINIBAND_DEVICES) -> list[str]:
    """Return the names of the node's RDMA devices, EFA's among them, that have an active port.

    The folder exists without a device as soon as the kernel has loaded its InfiniBand module.
    A port's ``state`` reads ``4: ACTIVE``. A device whose ports cannot be read counts.
    """
    return sorted(path.name for path in folder.glob("*") if _has_active_port(path))


def _has_active_port(device: Path) -> bool:
    try:
        states = [path.read_text() for path in device.glob("ports/*/state")]
    except OSError:
        return True
    return not states or any("ACTIVE" in state for state in states)


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


def join(choice: BackendChoice, on_hang: Callable[[str], None]) -> BackendChoice:
    """Create the process group of ``choice``, which Accelerate then uses; return the actual choice.

    SMDDP is tested first. If that fails on any rank, all use NCCL. ``on_hang`` is called from
    another thread if the test does not end, and must end the process.
    """
    if choice.backend == "none":
        return choice
    import torch
    import torch.distributed as dist

    if choice.backend != "gloo":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if choice.backend == "smddp":
        from sm_train.entrypoints.distributed.smddp import join_smddp

        problem = join_smddp(COLLECTIVE_TIMEOUT, on_hang)
        return choice if problem is None else fallback(problem)
    dist.init_process_group(backend=choice.backend, timeout=COLLECTIVE_TIMEOUT)
    return choice


def fallback(problem: str) -> BackendChoice:
    """Return the choice for a job whose SMDDP fails its self-test with ``problem``."""
    warning = f"SMDDP fails its self-test: {problem}; NCCL is used instead"
    return BackendChoice("nccl", "SMDDP fails its self-test", warning)
