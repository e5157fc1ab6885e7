"""Reads a node's place in its cluster from the variables of Kubernetes, torchrun or Slurm."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500
"""Port of torchrun's rendezvous if the environment names none, as Kubeflow Trainer sets it."""

_SLURM_FIRST_PORT, _SLURM_PORTS = 20_000, 10_000


class ClusterError(RuntimeError):
    """The environment does not describe a cluster; the message is one line."""


@dataclass(frozen=True)
class ClusterPlace:
    """A node's rank and name among ``hosts``, which are in the order of ranks.

    ``source`` names the variables that were read.
    """

    node_rank: int
    hosts: tuple[str, ...]
    master_addr: str
    master_port: int
    source: str

    @property
    def current_host(self) -> str:
        return self.hosts[self.node_rank]


def read_cluster(environment: Mapping[str, str], nodes: int = 1) -> ClusterPlace:
    """Return the node's place; a process with none of the variables is a cluster of its own.

    ``GROUP_RANK`` is that of an elastic agent's worker, ``PET_*`` are those of Kubeflow's
    operators, ``SLURM_*`` those of a Slurm step, and ``JOB_COMPLETION_INDEX`` is an Indexed Job's,
    which does not name the number of pods: ``nodes``.

    Raises:
        ClusterError: variables are missing or contradict each other.
    """
    if "GROUP_RANK" in environment:
        return _elastic(environment)
    if "SLURM_JOB_ID" in environment and "SLURM_NODEID" in environment:
        return _slurm(environment)
    if "PET_NNODES" in environment or "JOB_COMPLETION_INDEX" in environment:
        return _kubernetes(environment, nodes)
    return ClusterPlace(0, ("node-0",), "localhost", DEFAULT_PORT, "no variables: one node")


def _elastic(environment: Mapping[str, str]) -> ClusterPlace:
    nodes = _number(environment, "GROUP_WORLD_SIZE")
    rank = _rank(environment, "GROUP_RANK", nodes)
    return ClusterPlace(
        rank,
        tuple(f"node-{number}" for number in range(nodes)),
        _text(environment, "MASTER_ADDR"),
        _number(environment, "MASTER_PORT"),
        "GROUP_RANK",
    )


def _kubernetes(environment: Mapping[str, str], nodes: int) -> ClusterPlace:
    if "PET_NNODES" in environment:
        nodes = _number(environment, "PET_NNODES")
    ranked_by = "PET_NODE_RANK" if "PET_NODE_RANK" in environment else "JOB_COMPLETION_INDEX"
    rank = _rank(environment, ranked_by, nodes)
    if nodes == 1:
        host = environment.get("HOSTNAME") or socket.gethostname()
        return ClusterPlace(0, (host,), "localhost", DEFAULT_PORT, ranked_by)
    first = _text(environment, "PET_MASTER_ADDR")
    port = environment.get("PET_MASTER_PORT", "")
    return ClusterPlace(
        rank,
        _pod_names(first, nodes),
        first,
        int(port) if port.isdigit() else DEFAULT_PORT,
        ranked_by,
    )


def _pod_names(first: str, nodes: int) -> tuple[str, ...]:
    """Return the names of all pods from the address of the first.

    Kubeflow's operators name them: ``run-node-0-0.run``, ``run-node-0-1``; ``run-master-0``,
    ``run-worker-0``.
    """
    name = first.partition(".")[0]
    if name.endswith("-master-0"):
        workers = name.removesuffix("-master-0") + "-worker-"
        return (name, *(f"{workers}{number}" for number in range(nodes - 1)))
    if name.endswith("-0"):
        return tuple(f"{name[:-2]}-{number}" for number in range(nodes))
    return tuple(f"node-{number}" for number in range(nodes))


def _slurm(environment: Mapping[str, str]) -> ClusterPlace:
    listed = environment.get("SLURM_STEP_NODELIST") or _text(environment, "SLURM_JOB_NODELIST")
    hosts = expand_node_list(listed)
    name = environment.get("SLURMD_NODENAME", "")
    rank = hosts.index(name) if name in hosts else _rank(environment, "SLURM_NODEID", len(hosts))
    # Jobs that share nodes have different ports. A job needs two: the rendezvous and the one above.
    job = _number(environment, "SLURM_JOB_ID")
    return ClusterPlace(
        rank,
        hosts,
        hosts[0],
        _SLURM_FIRST_PORT + job * 3 % _SLURM_PORTS,
        "SLURM_JOB_NODELIST, SLURM_NODEID",
    )


_ITEM = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")


def expand_node_list(text: str) -> tuple[str, ...]:
    """Expand Slurm's list of nodes: ``ip-10-1-[8-10,12],gpu[01-02]-a``.

    Same result as ``scontrol show hostnames``, which containers do not have.

    Raises:
        ClusterError: it is not such a list.
    """
    names: list[str] = []
    position = 0
    while position < len(text):
        item = _ITEM.match(text, position)
        if item is None:
            raise ClusterError(f"SLURM_JOB_NODELIST: {text!r} is not a list of nodes")
        names += _expand_item(item[1], text)
        position = item.end()
    if not names:
        raise ClusterError("SLURM_JOB_NODELIST: is empty")
    return tuple(dict.fromkeys(names))


def _expand_item(item: str, text: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [head]
    ranges, _, tail = rest.partition("]")
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            raise ClusterError(f"SLURM_JOB_NODELIST: {text!r} is not a list of nodes")
        width = len(first)
        numbers += [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    return [f"{head}{number}{end}" for number in numbers for end in _expand_item(tail, text)]


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise ClusterError(f"{name} is not set: start the job with the manifest of sm-train")
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not value.isdecimal():
        raise ClusterError(f"{name}: {value!r} is not a number")
    return int(value)


def _rank(environment: Mapping[str, str], name: str, nodes: int) -> int:
    rank = _number(environment, name)
    if rank >= nodes:
        raise ClusterError(f"{name}: {rank} is not below the number of nodes, {nodes}")
    return rank
