"""The collective backend follows from the instances, the launcher and the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sm_train.entrypoints.distributed.backend import choose, rdma_devices

CPU_NODE: dict[str, Any] = {
    "instance_type": None,
    "nodes": 1,
    "processes": 16,
    "gpus": 0,
    "backend": "auto",
    "smddp_installed": False,
    "rdma": [],
    "mpi": False,
}
P4DE = {"instance_type": "ml.p4de.24xlarge", "gpus": 8, "rdma": ["efa_0"]}
P5 = {"instance_type": "ml.p5.48xlarge", "gpus": 8, "rdma": ["mlx5_9", "rdmap16s27"]}
SMDDP = {"smddp_installed": True, "mpi": True}


@pytest.mark.parametrize(
    ("environment", "backend", "reason"),
    [
        ({**P4DE, "nodes": 4, **SMDDP, "backend": "smddp"}, "smddp", "SMDDP in the image"),
        ({**P4DE, "nodes": 4, **SMDDP}, "nccl", "NCCL over EFA"),
        ({**P4DE, "nodes": 4, **SMDDP, "backend": "nccl"}, "nccl", "EFA"),
        ({**P4DE, "nodes": 1, **SMDDP, "backend": "smddp"}, "nccl", "one node"),
        ({**P5, "nodes": 4}, "nccl", "NCCL over EFA"),
        ({**P5, "nodes": 4, "rdma": ["mlx5_0", "mlx5_1"]}, "nccl", "NCCL over mlx5_0, mlx5_1"),
        ({**P5, "nodes": 4, "rdma": []}, "nccl", "which is slow"),
        ({"nodes": 2, "backend": "smddp"}, "gloo", "no GPU"),
        ({**P5, "nodes": 1, "processes": 1}, "none", "a single process"),
    ],
)
def test_backend_follows_from_the_environment(
    environment: dict[str, Any], backend: str, reason: str
) -> None:
    choice = choose(**(CPU_NODE | environment))
    assert choice.backend == backend
    assert reason in choice.reason
    assert choice.warning is None


@pytest.mark.parametrize(
    ("environment", "obstacle"),
    [
        (P5 | SMDDP, "ml.p5.48xlarge is not a p4d or p4de"),
        (P4DE | {"mpi": True}, "the image does not contain it"),
        (P4DE | {"smddp_installed": True}, "smddprun did not start the processes"),
    ],
)
def test_nccl_with_a_warning_replaces_smddp_where_it_cannot_run(
    environment: dict[str, Any], obstacle: str
) -> None:
    choice = choose(**(CPU_NODE | environment | {"nodes": 2, "backend": "smddp"}))
    assert choice.backend == "nccl"
    assert choice.warning == f"SMDDP is not used: {obstacle}; NCCL is used instead"


def test_rdma_devices_are_those_with_an_active_link(tmp_path: Path) -> None:
    """The kernel's InfiniBand module creates the folder on hosts without a device."""
    assert rdma_devices(tmp_path / "none") == []
    assert rdma_devices(tmp_path) == []
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("rdmap16s27", None)):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        if state is not None:
            (port / "state").write_text(f"{state}\n")
    assert rdma_devices(tmp_path) == ["mlx5_0", "rdmap16s27"]
