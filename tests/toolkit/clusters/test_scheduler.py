"""Limits of partitions, as `scontrol show partition --oneliner` prints them."""

from __future__ import annotations

from typing import Any

import pytest
from sm_train.toolkit.clusters.scheduler_checks import partition_findings

from tests.support.run_documents import config

PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
    "Default={default} QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 "
    "Hidden=NO MaxNodes={nodes} MaxTime={time} MinNodes={least} LLN=NO MaxCPUsPerNode=UNLIMITED "
    "Nodes=gpu-[0-7] PriorityTier=1 State={state} TotalCPUs=8 TotalNodes=8"
)
"""A line of Slurm 22.05.8."""


def partition(name: str = "gpu", **fields: str) -> str:
    usual = {"default": "YES", "nodes": "UNLIMITED", "time": "2-00:00:00", "least": "0"}
    return PARTITION.format(name=name, **({"state": "UP"} | usual | fields))


def of_options(nodes: str) -> Any:
    return config(slurm={"shared_folder": "/fsx", "options": {"time": "60", "nodes": nodes}})


def found(text: str, nodes: int = 4, **options: Any) -> list[str]:
    run = config(slurm={"shared_folder": "/fsx", "options": options})
    return [each.message for each in partition_findings(text, run, nodes)]


@pytest.mark.parametrize("time", ["2880", "2-00:00:00", "48:00:00", "1-23", "59:59", "2-00:00"])
def test_a_job_that_fits_has_no_finding(time: str) -> None:
    assert found(partition(), time=time) == []


@pytest.mark.parametrize(
    ("time", "asked"),
    [
        ("2881", "2,881 minutes"),
        ("2-00:00:01", "2,881 minutes"),
        ("0", "no limit"),
        ("UNLIMITED", "no limit"),
        ("3-0", "4,320 minutes"),
    ],
)
def test_a_job_that_would_wait_for_ever_is_an_error(time: str, asked: str) -> None:
    [message] = found(partition(), time=time)
    assert message.startswith(f"{asked}: the partition gpu allows 2,880 minutes,")


def test_the_default_of_the_partition_is_never_too_long() -> None:
    assert found(partition(), time=False) == []
    assert len(found(partition())) == 1  # cluster.max_runtime: five days


def test_nodes_state_and_unknown_partitions() -> None:
    fits = {"time": "60"}
    assert found(partition(nodes="2"), **fits) == ["4 nodes: the partition gpu has MaxNodes 2"]
    assert found(partition(least="8"), **fits) == ["4 nodes: the partition gpu has MinNodes 8"]
    assert found(partition(), 9, **fits) == ["9 nodes: the partition gpu has TotalNodes 8"]
    assert found(partition(state="DOWN"), **fits) == ["gpu: is DOWN"]
    [unknown] = found(partition(default="NO"), **fits)
    assert unknown == "no default partition: the cluster has gpu"
    assert found(partition(), nodes=4, time="60") == []
    [many] = [each.message for each in partition_findings(partition(), of_options("9"), 4)]
    assert many == "9 nodes: the partition gpu has TotalNodes 8"
    both = f"{partition(time='5')}\n{partition('long', default='NO')}"
    assert found(both, time="60", partition="gpu,long") == []
