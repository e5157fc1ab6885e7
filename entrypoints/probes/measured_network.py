"""The network as the doctor measured it: the seconds of any collective, from sweeps of sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sm_train.cost.network import CollectiveCalls, Scope, Topology
from sm_train.entrypoints.probes.bus_bandwidth import Sweeps, seconds_for
from sm_train.entrypoints.probes.measurements import ClusterMeasurements, GroupMeasurement


@dataclass(frozen=True)
class MeasuredNetwork(Topology):
    """Sweeps over all ranks, inside a node, and over groups with one rank on each node."""

    sweeps: Mapping[Scope, Sweeps]

    def knows(self, calls: Iterable[CollectiveCalls]) -> bool:
        """Return whether every collective of ``calls`` was measured."""
        return all(self.sweeps[call.scope].get(call.collective) for call in calls)

    def seconds(self, call: CollectiveCalls) -> float:
        """Return the seconds of one call.

        Raises:
            ValueError: the collective was not measured (see :meth:`knows`).
        """
        seconds = seconds_for(call.bytes, self.sweeps[call.scope].get(call.collective, ()))
        if seconds is None:
            raise ValueError(f"{call.collective}: not measured ({call.scope})")
        return seconds


def measured_network(cluster: ClusterMeasurements) -> MeasuredNetwork | None:
    """Return the measured network: of several groups the slowest, which all ranks wait for."""
    if cluster.world is None:
        return None
    world = cluster.world.sweeps
    sweeps: dict[Scope, Sweeps] = {
        "world": world,
        "node": _slowest_sweeps(tuple(cluster.intra_node.values())) or world,
        "between nodes": _slowest_sweeps(tuple(cluster.inter_node.values())) or world,
    }
    return MeasuredNetwork(cluster.topology.nodes, cluster.topology.per_node, sweeps)


def _slowest_sweeps(groups: Sequence[GroupMeasurement]) -> Sweeps | None:
    slowest = min(groups, key=lambda group: group.best_busbw() or 0.0, default=None)
    return slowest.sweeps if slowest else None
