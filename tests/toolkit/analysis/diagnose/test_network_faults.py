"""Faults of InfiniBand and RoCE have names, and so have the node or adapter that failed."""

from __future__ import annotations

import pytest
from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis

from tests.support.job_log_lines import SimulatedJob
from tests.support.log_lines import diagnosed


def diagnosed_on(*messages: tuple[int, str]) -> Diagnosis:
    """Diagnose a job of two nodes that ends with messages, each on a node."""
    logs: dict[int, list[str]] = {0: [], 1: []}
    for node, text in SimulatedJob(nodes=2, intervals=5).lines():
        if node is not None and '"kind": "end"' not in text:
            logs[node].append(text)
    for node, text in messages:
        logs[node].append(text)
    return diagnosed(*logs.values())


PORT_ERROR = (
    "algo-2:50:91 [0] transport/net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error"
)
NIC = "algo-1:40:90 [2] transport/net_ib.cc:1295 NCCL WARN NET/IB : "


@pytest.mark.parametrize(
    ("message", "cause", "retryable", "detail"),
    [
        (
            f"{NIC}Got completion from peer 10.0.1.5<39138> with status=12 opcode=0 len=0 vendor "
            "err 129 (Send) hca mlx5_2",
            *("ib-retry-exceeded", True, "named peers: 10.0.1.5"),
        ),
        (
            f"{NIC}Got completion from peer 10.0.1.5<39138> with error 4, opcode 1, len 0, vendor "
            "err 81",
            *("ib-local-protection", False, "named peers: 10.0.1.5"),
        ),
        (f"{NIC}mlx5_4:1 Got async event : port error", "ib-port-down", True, "mlx5_4:1"),
        (
            "algo-1:40:90 [2] misc/ibvwrap.cc:182 NCCL WARN Call to ibv_reg_mr_iova2 failed with "
            "error Bad address",
            *("ib-memory-registration", False, ""),
        ),
        (
            "algo-1:40:90 [2] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 110 "
            "Connection timed out, on dev mlx5_4:1, curr state INIT, next state RTR",
            *("ib-address", False, "named adapters: mlx5_4:1 of algo-1"),
        ),
        (
            "kernel: mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, High "
            "Temperature",
            *("ib-overheated", True, "named adapters: 0000:5c:00.0"),
        ),
    ],
)
def test_fault_has_a_name_and_says_whether_a_restart_helps(
    message: str, cause: str, retryable: bool, detail: str
) -> None:
    found = diagnosed_on((0, message))
    assert (found.cause, found.retryable) == (cause, retryable)
    assert detail in "; ".join(found.details)
    assert found.action


def test_node_whose_port_lost_its_link_is_named_and_not_the_one_that_noticed() -> None:
    """The peer's completion error comes first in time, as retries of both differ."""
    found = diagnosed_on(
        (0, f"{NIC}Got completion from peer 10.0.1.5<39138> with error 12, opcode 2, len 1"),
        (1, PORT_ERROR),
    )
    assert found.cause == "ib-port-down"
    assert found.first is not None
    assert found.first.node == "algo-2"


def test_heat_explains_the_lost_link_and_its_consequences() -> None:
    found = diagnosed_on(
        (0, f"{NIC}Got completion from peer 10.0.1.5<39138> with error 12, opcode 2, len 1"),
        (1, "kernel: mlx5_core: Port module event[error]: module 0, Cable error, High Temperature"),
        (1, PORT_ERROR),
    )
    assert found.cause == "ib-overheated"
    assert found.first is not None
    assert found.first.node == "algo-2"
