"""A node's place from the variables of Kubernetes, torchrun's agents and Slurm."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.clusters.cluster_variables import (
    ClusterError,
    expand_node_list,
    read_cluster,
)

TRAINJOB = {
    "PET_NNODES": "12",
    "PET_NODE_RANK": "11",
    "PET_MASTER_ADDR": "demo-256px-node-0-0.demo-256px",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "11",
}


def test_trainjob() -> None:
    place = read_cluster(TRAINJOB)
    assert place.node_rank == 11
    assert place.current_host == "demo-256px-node-0-11"
    assert place.hosts[:2] == ("demo-256px-node-0-0", "demo-256px-node-0-1")
    assert (place.master_addr, place.master_port) == ("demo-256px-node-0-0.demo-256px", 29500)


def test_indexed_job_without_an_operator() -> None:
    variables = {"JOB_COMPLETION_INDEX": "1", "PET_MASTER_ADDR": "x-0.x"}
    assert read_cluster(variables, nodes=3).hosts == ("x-0", "x-1", "x-2")


def test_pytorchjob_names_master_and_workers() -> None:
    variables = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "run-master-0"}
    place = read_cluster(variables | {"PET_MASTER_PORT": "23456"})
    assert place.hosts == ("run-master-0", "run-worker-0", "run-worker-1")
    assert place.current_host == "run-worker-1"
    assert place.master_port == 23456


def test_worker_of_an_elastic_agent() -> None:
    variables = {
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }
    place = read_cluster(variables)
    assert (place.current_host, place.hosts) == ("node-1", ("node-0", "node-1"))


def test_slurm_takes_the_rank_from_the_list_of_nodes() -> None:
    variables = {
        "SLURM_JOB_ID": "77",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "3",
        "SLURM_JOB_NODELIST": "ip-10-1-[8-10]",
        "SLURMD_NODENAME": "ip-10-1-10",
    }
    place = read_cluster(variables)
    assert place.hosts == ("ip-10-1-8", "ip-10-1-9", "ip-10-1-10")
    assert (place.node_rank, place.master_addr) == (2, "ip-10-1-8")
    assert 1024 < place.master_port < 65535
    # A repeated step on a replaced node has a list of its own.
    again = read_cluster(variables | {"SLURM_STEP_NODELIST": "ip-10-1-[8,10]"})
    assert again.hosts == ("ip-10-1-8", "ip-10-1-10")


def test_no_variables_are_one_node() -> None:
    assert read_cluster({}).hosts == ("node-0",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"PET_NNODES": "two"}, "PET_NNODES: 'two' is not a number"),
        ({"PET_NODE_RANK": "12"}, "PET_NODE_RANK: 12 is not below the number of nodes, 12"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
    ],
)
def test_contradictions_are_one_line_errors(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_cluster(TRAINJOB | changes)
    assert message in str(caught.value)


# What `scontrol show hostnames` prints (Slurm's hostlist(7)).
LISTS = {
    "node1": ["node1"],
    "a[1-3]": ["a1", "a2", "a3"],
    "gpu[08-11,20]-x,cpu": ["gpu08-x", "gpu09-x", "gpu10-x", "gpu11-x", "gpu20-x", "cpu"],
    "r[1-2]n[1-2]": ["r1n1", "r1n2", "r2n1", "r2n2"],
}


@pytest.mark.parametrize("text", LISTS)
def test_node_lists(text: str) -> None:
    assert list(expand_node_list(text)) == LISTS[text]


@pytest.mark.parametrize("text", ["", "a[1-", "a[x]", "a]", ",", "a,,b", "a[]"])
def test_damaged_node_lists(text: str) -> None:
    with pytest.raises(ClusterError):
        expand_node_list(text)


@given(st.lists(st.integers(0, 500), min_size=1, unique=True), st.integers(1, 4))
def test_any_ranges_expand_to_their_numbers(numbers: list[int], width: int) -> None:
    numbers.sort()
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1 and len(str(number)) == len(str(ranges[-1][0])):
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ",".join(f"{a:0{width}d}-{b:0{width}d}" for a, b in ranges)
    expected = [f"n{number:0{width}d}" for number in numbers]
    assert list(expand_node_list(f"n[{text}]")) == expected


@given(st.text(max_size=40))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    with suppress(ClusterError):
        assert expand_node_list(text)
