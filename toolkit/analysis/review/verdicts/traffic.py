"""Compares the network's traffic with what the model's collectives need in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sm_train.cost.network import (
    CollectiveCalls,
    GpuNetwork,
    bus_factor,
    step_collectives,
)
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import finite
from sm_train.toolkit.analysis.review.review_model import Level
from sm_train.toolkit.analysis.review.verdicts.gpus import rank_times
from sm_train.toolkit.analysis.review.verdicts.speed import steady_speeds
from sm_train.toolkit.terminal.formatting import format_number

LEAST_SHARE, MOST_SHARE = 0.5, 2.0
"""Received ÷ needed bytes outside which the traffic is not the collectives' alone. Rings, trees and
NCCL's protocols differ by less."""

WAITING_SHARE = 0.15
"""Share of a step that ranks wait in collectives, from which the network may limit the speed."""

SLOW_FACTOR = 2.0
"""The wait relative to the time that the collectives take at the instance type's usual rate."""


@dataclass(frozen=True)
class NetworkUse:
    """What one node receives from the others in a step, in bytes, and how long the ranks wait.

    ``waiting_seconds`` is None without measured busy times; ``usual_seconds`` is the time of all
    collectives at the rate that this instance type usually reaches.
    """

    needed: float
    received: float
    step_seconds: float
    waiting_seconds: float | None
    usual_seconds: float

    @property
    def level(self) -> Level:
        if self._slow():
            return "bad"
        share = self.received / self.needed
        return "good" if LEAST_SHARE <= share <= MOST_SHARE else "warning"

    def _slow(self) -> bool:
        waiting = self.waiting_seconds
        return (
            waiting is not None
            and waiting > WAITING_SHARE * self.step_seconds
            and waiting > SLOW_FACTOR * self.usual_seconds
        )

    @property
    def problem(self) -> str:
        """What is wrong with the traffic, if the level is not good."""
        needed = f"{_gigabytes(self.needed)} that the model's collectives need per step"
        if self._slow():
            assert self.waiting_seconds is not None
            share = self.waiting_seconds / self.step_seconds
            return (
                f"the network is slow: the ranks wait {share:.0%} of each step for the {needed}, "
                f"{format_number(self.waiting_seconds)} s instead of "
                f"{format_number(self.usual_seconds)} s"
            )
        less = self.received < self.needed
        reason = "the rest takes another interface" if less else "packets are sent again, or twice"
        return f"nodes receive {_gigabytes(self.received)} per step, not the {needed}: {reason}"

    def __str__(self) -> str:
        return (
            f"per step a node receives {_gigabytes(self.received)}; the model's collectives need "
            f"{_gigabytes(self.needed)}, which usually take {format_number(self.usual_seconds)} s "
            f"of {format_number(self.step_seconds)} s"
        )


def network_use(facts: JobFacts, rate_field: str) -> NetworkUse | None:
    """Return the traffic per step by the rates in ``rate_field``; None if it is unknown."""
    start, speeds = facts.log.last("start") or {}, steady_speeds(facts)[1]
    tables = [table[rate_field] for table in facts.log.nodes.values()]
    rates = np.concatenate([finite(table) for table in tables]) if tables else np.array([])
    parameters, instances = start.get("parameters"), facts.instances
    if not (parameters and len(rates) and len(speeds) and facts.instance_type and instances):
        return None
    network = facts.instance_type.network(instances)
    calls = step_collectives(
        start.get("sharding") or "none",
        parameters + start.get("frozen_parameters", 0),
        network,
        trained=parameters,
        bf16=start.get("precision") == "bf16",
        reduce_bf16=start.get("reduce_dtype") == "bf16",
        passes=start.get("gradient_accumulation_steps") or 1,
        unsharded_gradients=start.get("unsharded_grad_accumulation", True),
    )
    needed = sum(_received(call, network) for call in calls)
    if not needed:
        return None
    step_seconds = 1 / float(np.median(speeds))
    usual = sum(call.count * call.passes * network.seconds(call) for call in calls)
    busy = [rank.busy + rank.data_wait * step_seconds for rank in rank_times(facts) if rank.busy]
    waiting = max(0.0, step_seconds - max(busy)) if busy else None
    return NetworkUse(needed, float(rates.mean()) * step_seconds, step_seconds, waiting, usual)


def _received(call: CollectiveCalls, network: GpuNetwork) -> float:
    """Return the bytes of ``call`` that a node receives from others: a ring enters it once."""
    if network.nodes == 1 or call.scope == "node":
        return 0.0
    rings = network.per_node if call.scope == "between nodes" else 1
    factor = bus_factor(call.collective, network.ranks(call.scope))
    return rings * call.count * call.passes * call.bytes * factor


def _gigabytes(count: float) -> str:
    return f"{format_number(count / 1e9)} GB"
