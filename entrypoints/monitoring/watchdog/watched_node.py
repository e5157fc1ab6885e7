"""What all parts of a node's watchdog share: the job, the node, where reports go, other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.job_interface.events import EventLog
from sm_train.entrypoints.job_interface.job_config import JobConfig
from sm_train.entrypoints.job_interface.node_description import machine_name
from sm_train.entrypoints.monitoring.alert_messages import AlertFormatter
from sm_train.entrypoints.monitoring.alert_sinks import AlertDispatcher
from sm_train.entrypoints.monitoring.first_failure import CONSEQUENCES, FailureLog, lost_node
from sm_train.entrypoints.monitoring.peers import NodeStatus, PeerLink, PeerStall
from sm_train.entrypoints.monitoring.stall_detector import RankStatus
from sm_train.entrypoints.monitoring.watchdog.local_ranks import LocalRanks, NodeInfo

DISK_TIMEOUT = 5.0
"""Longest wait for a file, in seconds: a file system may hang."""


@dataclass(frozen=True)
class WatchedNode:
    """One node of the job; ``peers`` are the watchdogs of the others, None if they are unreachable.

    ``clock`` returns monotonic seconds.
    """

    config: JobConfig
    paths: SageMakerPaths
    ranks: LocalRanks
    events: EventLog
    dispatcher: AlertDispatcher
    formatter: AlertFormatter
    peers: PeerLink | None
    clock: Callable[[], float]

    @property
    def info(self) -> NodeInfo:
        return self.ranks.info

    @property
    def is_reporter(self) -> bool:
        """Whether this node sends the alerts that concern all nodes."""
        if self.peers is not None:
            return self.peers.is_reporter
        return self.info.node == 0

    def exchange(
        self, ranks: Sequence[RankStatus], stall: PeerStall | None, failures: FailureLog
    ) -> None:
        """Send this node's state to the other nodes, and add their failures to ``failures``."""
        peers, node = self.peers, self.info.node
        if peers is None:
            return
        # The first node's replies carry the likeliest failure of all nodes.
        likeliest = failures.likeliest(node if node else None)
        busy = self.ranks.busy_totals()
        peers.exchange(NodeStatus(ranks, stall, likeliest, busy, machine_name()))
        failures.add(peers.failures(), self.clock())
        found = failures.likeliest()
        if found is None or found.kind not in CONSEQUENCES:
            return
        for lost, silent in peers.lost_nodes().items():
            failure = lost_node(lost, silent, found)
            self.events.warn("node-lost", failure.text, blamed_node=lost)
            failures.add([failure], self.clock())
