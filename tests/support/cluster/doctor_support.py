"""Helpers of the tests of doctor, which other tests use as well."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster.doctor_cluster import DoctorCluster
from tests.support.cluster.network_namespaces import (
    INTERFACE,
    NetworkNamespaces,
)
from tests.support.cluster.training_jobs import Job, tiny_run


def tiny_job(folder: Path, timeout: int = 60, mode: str = "auto") -> Job:
    config = tiny_run(max_steps=2)
    doctor = config.doctor.model_copy(update={"timeout": timeout, "mode": mode})
    return Job(folder, config.model_copy(update={"doctor": doctor}))


def cluster_on(folder: Path, hosts: NetworkNamespaces, timeout: int = 60) -> DoctorCluster:
    """Return a cluster with one node on each host."""
    count = len(hosts.names)
    return DoctorCluster(
        folder / "cluster",
        tiny_job(folder / "job", timeout),
        count,
        master=hosts.address(0),
        prefixes=[hosts.prefix(host) for host in range(count)],
        interface=INTERFACE,
    )
