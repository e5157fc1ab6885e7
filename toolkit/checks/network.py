"""Checks settings of the network between a job's instances."""

from __future__ import annotations

from collections.abc import Iterator

from sm_train.cost.instances import instance_type
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.checks.finding import Check, Finding

ENCRYPTED_TRAFFIC = Check("encrypted-traffic", ("warning",))


EFA_VARIABLES = Check("efa-variables", ("warning",))

_RDMA_READS = ("ml.p4d", "ml.p5", "ml.p6", "ml.trn")
"""Types for which AWS's own tools set FI_EFA_USE_DEVICE_RDMA (sagemaker 3.27), and later ones."""


def network_findings(config: RunConfig) -> Iterator[Finding]:
    """Check the encryption of traffic between instances, and variables for EFA."""
    if any(stage.instances > 1 for stage in config.stages):
        yield from _encrypted_traffic(config)
        yield from _efa_variables(config)


def _efa_variables(config: RunConfig) -> Iterator[Finding]:
    cluster = config.cluster
    problems = {}
    if cluster.environment.get("FI_EFA_USE_DEVICE_RDMA") == "1":
        unknown = [name for name in cluster.instance_types if not name.startswith(_RDMA_READS)]
        problems["FI_EFA_USE_DEVICE_RDMA"] = unknown, "may have no RDMA reads"
    if cluster.environment.get("FI_PROVIDER") == "efa":
        without = [name for name in cluster.instance_types if not instance_type(name).supports_efa]
        problems["FI_PROVIDER"] = without, "has no EFA"
    for variable, (names, problem) in problems.items():
        if names:
            yield EFA_VARIABLES.found(
                "warning",
                f"cluster.environment.{variable}",
                f"{', '.join(names)} {problem}: the processes would abort",
                "remove it; NCCL's plugin uses what the device can do",
            )


def _encrypted_traffic(config: RunConfig) -> Iterator[Finding]:
    cluster = config.cluster
    if not cluster.encrypt_traffic:
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
