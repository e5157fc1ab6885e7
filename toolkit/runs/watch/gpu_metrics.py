"""Reads each node's GPU utilization from the platform, for jobs that do not log it themselves."""

from __future__ import annotations

from sm_train.cost.instances import UnknownInstanceTypeError, instance_type
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.runs.run_state import RunState

_WINDOW_SECONDS = 900.0
"""CloudWatch may publish a minute some minutes late."""


def gpu_utilization(state: RunState) -> dict[str, float]:
    """Return the newest minute of each node, in percent of one GPU; missing nodes are unknown.

    An error of the platform gives an empty result, so that it does not end the watch.
    """
    job = state.current.job if state.current else None
    if job is None or not job.live or job.started is None:
        return {}
    nodes = [node for node in live_nodes(state) if not _logs_utilization(state, node)]
    try:
        gpus = instance_type(job.instances[0]).accelerators
    except UnknownInstanceTypeError:
        return {}
    if not nodes or not gpus:
        return {}

    now = state.now.timestamp()
    try:
        names = ["GPUUtilization"]
        metrics = state.run.node_metrics(job, nodes, now - _WINDOW_SECONDS, now, now, names)
    except UserError:
        return {}
    # CloudWatch sums the GPUs of an instance.
    return {
        node: float(series.values[-1]) / gpus
        for (node, _), series in metrics.items()
        if series.values.size
    }


def live_nodes(state: RunState) -> list[str]:
    """Return the names of the live job's nodes."""
    job = state.current.job if state.current else None
    return list(job.nodes) if job is not None and job.live else []


def _logs_utilization(state: RunState, node: str) -> bool:
    logged = state.live.node_metrics.get(node)
    return logged is not None and logged.event["gpu_utilization_mean"] is not None
