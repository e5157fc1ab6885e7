"""The nodes of a job, as one log shows them: their names, ranks and network."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sm_train.entrypoints.base.sagemaker_paths import host_name
from sm_train.entrypoints.distributed.nccl_log import LITERALS as NCCL_LITERALS
from sm_train.toolkit.analysis.diagnose.line_patterns import COMMUNICATOR
from sm_train.toolkit.analysis.diagnose.log_lines import LogLine
from sm_train.toolkit.records.job_logs import Event

_MAX_NCCL_LINES = 2000
# "… NCCL INFO comm 0x55cc8aa86c70 rank 0 nranks 16 cudaDev 0 … - Init START"
_COMMUNICATOR_SIZE = re.compile(r"NCCL INFO .* nranks (\d{1,6}) ")
# A node's first line on Kubernetes and Slurm (entrypoints/clusters/start.py), after the prefix of
# `srun --label`: "1: sm-train start: node 1 of 2 (ip-10-1-9; …"
_NODE_START = "sm-train start: node "
_NODE_STARTED = re.compile(
    rb"^(?: *(\d+): )?[^\n]{0,300}?" + _NODE_START.encode() + rb"(\d+) of \d+ \(([^;\s]{1,253});",
    re.MULTILINE,
)


@dataclass
class JobNodes:
    """The nodes and ranks of a job, as far as one log names them."""

    ranks: dict[str | None, set[int]] = field(default_factory=dict)
    """Node → the ranks of its parsed lines."""
    hosts: dict[int, str] = field(default_factory=dict)
    """Names of nodes by their rank, outside of SageMaker."""
    task_hosts: dict[int, str] = field(default_factory=dict)
    """Names of nodes by their Slurm task, of jobs with one task on each node."""
    world_size: int = 0
    nodes: int = 0
    """The number in the job's start event; 0 before it."""
    ranks_per_node: int | None = None
    nccl: dict[str | None, list[str]] = field(default_factory=dict)
    """Node → NCCL's lines about its network."""

    def read_names(self, block: bytes) -> None:
        """Read the lines in which a pod or a Slurm task names its node."""
        if _NODE_START.encode() not in block:
            return
        for task, rank, name in (match.groups() for match in _NODE_STARTED.finditer(block)):
            self.hosts[int(rank)] = name.decode("utf-8", "replace")
            if task is not None:
                self.task_hosts[int(task)] = self.hosts[int(rank)]

    def node_name(self, rank: int) -> str:
        """Return the name of the node of this rank, as SageMaker names it if the log does not."""
        return self.hosts.get(rank) or host_name(rank, self.nodes)

    def read_start(self, event: Event) -> None:
        """Take the size of the job from its start event."""
        self.nodes, self.world_size = event["nodes"], event["world_size"]
        self.ranks_per_node = event["world_size"] // max(1, event["nodes"])

    def read_rank(self, line: LogLine, node: str | None) -> None:
        """Note the rank that wrote a line of ``node``."""
        if line.rank is not None:
            self.ranks.setdefault(node, set()).add(line.rank)

    def read_network(self, line: LogLine, node: str | None) -> None:
        """Keep what NCCL reports of the network of ``node``, and of its communicators."""
        if any(text in line.text for text in NCCL_LITERALS):
            lines = self.nccl.setdefault(node, [])
            lines += [line.text] if len(lines) < _MAX_NCCL_LINES else []
        # The start event of the job states it.
        is_unknown = not self.nodes and COMMUNICATOR in line.text
        if is_unknown and (size := _COMMUNICATOR_SIZE.search(line.text)):
            self.world_size = max(self.world_size, int(size[1]))
