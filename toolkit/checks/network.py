"""Checks settings of the network between a job's instances."""

from __future__ import annotations

from collections.abc import Iterator

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding

ENCRYPTED_TRAFFIC = Check(
    "encrypted-traffic",
    ("warning",),
    means="`cluster.encrypt_traffic` is set for a stage with several instances that have EFA, or "
    "that are in your VPC.",
    impact="In a VPC, the instances cannot reach each other unless their security group allows UDP "
    "500 and ESP (protocol 50), inbound and outbound, from and to itself. AWS does not document "
    "whether EFA carries encrypted traffic: without EFA, NCCL uses TCP, and training takes several "
    "times as long.",
    fix="Add the rules to the security group, and run `sm-train doctor RUN --canary`: its report "
    "names the transport and its bandwidth. Or leave `encrypt_traffic` out.",
    source="SageMaker developer guide, Protect Communications Between ML Compute Instances in a "
    "Distributed Training Job (2026-11)",
)


def network_findings(config: RunConfig) -> Iterator[Finding]:
    """Check the encryption of traffic between instances."""
    cluster = config.cluster
    if not cluster.encrypt_traffic or all(stage.instances == 1 for stage in config.stages):
        return
    problems, fixes = [], []
    with_efa = [name for name in cluster.instance_types if instance_type(name).supports_efa]
    if with_efa:
        problems.append(f"whether {', '.join(with_efa)} use EFA for encrypted traffic is unknown")
        fixes.append("run `sm-train doctor RUN --canary`, which reports the transport")
    if cluster.vpc is not None:
        groups = ", ".join(cluster.vpc.security_groups)
        problems.append(f"{groups} must allow UDP 500 and ESP (protocol 50) within the group")
        fixes.append(f"add both rules, inbound and outbound, to {groups}")
    if problems:
        yield ENCRYPTED_TRAFFIC.found(
            "warning", "cluster.encrypt_traffic", "; ".join(problems), "; ".join(fixes)
        )
