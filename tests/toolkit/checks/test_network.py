"""Checks of the network between instances."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.toolkit.checks.network import network_findings

from tests.support.run_documents import config, stage

VPC = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}


def messages(instances: int = 2, **cluster: Any) -> list[str]:
    run = config(cluster={"encrypt_traffic": True} | cluster, stages=[stage(instances=instances)])
    return [found.message for found in network_findings(run)]


def test_encrypted_traffic_with_efa_in_a_vpc_names_the_rules_of_the_security_group() -> None:
    [message] = messages(instance_type="ml.p5.48xlarge", vpc=VPC)
    assert "whether ml.p5.48xlarge use EFA for encrypted traffic is unknown" in message
    assert "sg-1 must allow UDP 500 and ESP (protocol 50) within the group" in message


@pytest.mark.parametrize(
    ("cluster", "part"),
    [
        ({"instance_type": "ml.p5.48xlarge"}, "EFA"),
        ({"instance_type": "ml.g5.xlarge", "vpc": VPC}, "UDP 500"),
        ({"instance_type": "ml.p5.48xlarge", "alternatives": ["ml.p4de.24xlarge"]}, "ml.p4de"),
    ],
)
def test_only_the_part_that_applies_is_reported(cluster: dict[str, Any], part: str) -> None:
    [message] = messages(**cluster)
    assert part in message


@pytest.mark.parametrize(
    "cluster",
    [
        {"instance_type": "ml.p5.48xlarge", "instances": 1, "vpc": VPC},
        {"instance_type": "ml.p5.48xlarge", "encrypt_traffic": False, "vpc": VPC},
        {"instance_type": "ml.g5.xlarge"},
    ],
)
def test_nothing_to_report(cluster: dict[str, Any]) -> None:
    assert messages(**cluster) == []


EFA = {"FI_EFA_USE_DEVICE_RDMA": "1", "FI_PROVIDER": "efa"}


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("ml.g5.48xlarge", ["FI_EFA_USE_DEVICE_RDMA"]),
        ("ml.g5.2xlarge", ["FI_EFA_USE_DEVICE_RDMA", "FI_PROVIDER"]),
        ("ml.p4d.24xlarge", []),
    ],
)
def test_variables_that_abort_on_an_instance_type_are_reported(
    name: str, variables: list[str]
) -> None:
    run = config(cluster={"instance_type": name, "environment": EFA})
    found = list(network_findings(run))
    assert [finding.where for finding in found] == [
        f"cluster.environment.{name}" for name in variables
    ]
    assert all(name in finding.message for finding in found)
    alone = config(cluster={"instance_type": name, "environment": EFA}, stages=[stage(instances=1)])
    assert not list(network_findings(alone))
