"""The collective backend follows from the instances, the launcher and the run file."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.entrypoints.distributed.backend import choose

CPU_NODE: dict[str, Any] = {
    "instance_type": None,
    "nodes": 1,
    "processes": 16,
    "gpus": 0,
    "backend": "auto",
    "smddp_installed": False,
    "efa": False,
    "mpi": False,
}
P4DE = {"instance_type": "ml.p4de.24xlarge", "gpus": 8, "efa": True}
P5 = {"instance_type": "ml.p5.48xlarge", "gpus": 8, "efa": True}
SMDDP = {"smddp_installed": True, "mpi": True}


@pytest.mark.parametrize(
    ("environment", "backend", "reason"),
    [
        ({**P4DE, "nodes": 4, **SMDDP}, "smddp", "SMDDP in the image"),
        ({**P4DE, "nodes": 4, "smddp_installed": True}, "nccl", "NCCL over EFA"),
        ({**P4DE, "nodes": 4}, "nccl", "NCCL over EFA"),
        ({**P4DE, "nodes": 4, **SMDDP, "backend": "nccl"}, "nccl", "EFA"),
        ({**P4DE, "nodes": 1, **SMDDP}, "nccl", "one node"),
        ({**P5, "nodes": 4, **SMDDP}, "nccl", "NCCL over EFA"),
        ({**P5, "nodes": 4, "efa": False}, "nccl", "slow between nodes"),
        ({"nodes": 2}, "gloo", "no GPU"),
        ({**P5, "nodes": 1, "processes": 1}, "none", "a single process"),
    ],
)
def test_backend_follows_from_the_environment(
    environment: dict[str, Any], backend: str, reason: str
) -> None:
    choice = choose(**(CPU_NODE | environment))
    assert choice.backend == backend
    assert reason in choice.reason


@pytest.mark.parametrize("instance", ["ml.p5.48xlarge", "ml.p5en.48xlarge", "ml.p6-b200.48xlarge"])
def test_several_nodes_with_efa_set_its_variables(instance: str) -> None:
    choice = choose(**(CPU_NODE | P5 | {"nodes": 2, "instance_type": instance}))
    assert choice.environment == {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}


@pytest.mark.parametrize("environment", [P5 | SMDDP, P4DE, P4DE | {"smddp_installed": True}])
def test_smddp_where_it_cannot_run_is_an_error(environment: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"backend: smddp cannot run: .*; use backend: nccl"):
        choose(**(CPU_NODE | environment | {"nodes": 2, "backend": "smddp"}))
