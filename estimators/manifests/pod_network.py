"""The network of a pod: EFA, InfiniBand or RoCE.

Sources, read 2026-11: NVIDIA's NCCL user guide (Environment Variables), the RDMA shared device
plugin (Mellanox/k8s-rdma-shared-dev-plugin), Multus (k8snetworkplumbingwg/multus-cni).
"""

from __future__ import annotations

from typing import Any

from sm_train.estimators.manifests.problem import ManifestError
from sm_train.estimators.manifests.stage_job import StageJob

EFA, HUGE_PAGES = "vpc.amazonaws.com/efa", "hugepages-2Mi"

_HUGE_PAGES = "5120Mi"
"""2 MiB huge pages of a pod with EFA (EKS guide, "Run machine learning training on Amazon EKS with
EFA")."""

_MULTUS = "k8s.v1.cni.cncf.io/networks"


def network_devices(job: StageJob) -> dict[str, str]:
    """Return the network devices of a pod, by their resources.

    Raises:
        ManifestError: there are none for several nodes, or the type has not as many EFA interfaces.
    """
    network = job.config.kubernetes.network
    named = {name: str(count) for name, count in network.resources.items()}
    if network.kind != "efa":
        if not named and job.nodes > 1:
            raise ManifestError(
                f"kubernetes.network.resources: not set; {network.kind} needs the RDMA resource of "
                "the nodes, which `kubectl describe node` lists, such as "
                "{rdma/hca_shared_devices_a: 1}"
            )
        return named
    if interfaces := _efa_interfaces(job):
        return {EFA: str(interfaces), HUGE_PAGES: _HUGE_PAGES, **named}
    return named


def _efa_interfaces(job: StageJob) -> int:
    name, available = job.instance.name, job.instance.efa_interfaces or 0
    wanted = job.config.kubernetes.efa
    if wanted is None:
        return available if job.nodes > 1 else 0
    if wanted > available:
        interfaces = "interface" if available == 1 else "interfaces"
        has = f"has {available} EFA {interfaces}" if available else "has no EFA"
        raise ManifestError(f"kubernetes.efa: {wanted}: {name} {has}; write {available} or less")
    return wanted


def network_variables(job: StageJob) -> dict[str, str]:
    """Return the variables by which NCCL and Gloo choose interfaces and adapters."""
    network = job.config.kubernetes.network
    variables = {}
    if network.interface is not None:
        # "=" takes the name as a whole; Gloo knows no prefixes.
        variables["NCCL_SOCKET_IFNAME"] = f"={network.interface}"
        variables["GLOO_SOCKET_IFNAME"] = network.interface
    if network.adapters:
        variables["NCCL_IB_HCA"] = "=" + ",".join(network.adapters)
    if network.gid_index is not None:
        variables["NCCL_IB_GID_INDEX"] = str(network.gid_index)
    if network.traffic_class is not None:
        variables["NCCL_IB_TC"] = str(network.traffic_class)
    return variables


def container_network(job: StageJob) -> dict[str, Any]:
    """Return what the container that trains needs for RDMA."""
    network = job.config.kubernetes.network
    if network.kind == "efa" or not network.ipc_lock:
        return {}
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}


def pod_network(job: StageJob) -> dict[str, Any]:
    """Return the networks of a pod besides that of the cluster."""
    network = job.config.kubernetes.network
    found: dict[str, Any] = {}
    if network.attachments:
        found["metadata"] = {"annotations": {_MULTUS: ", ".join(network.attachments)}}
    if network.host_network:
        # Names of services are still those of the cluster.
        found["spec"] = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return found
