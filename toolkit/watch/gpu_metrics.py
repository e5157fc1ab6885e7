"""How busy each machine's GPUs are by CloudWatch, for jobs that do not say it themselves."""

from __future__ import annotations

from typing import Any

from sm_train.cost.instances import UnknownInstanceTypeError, instance_type
from sm_train.toolkit.aws.session import for_region
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.runs.resolve import RunState

_WINDOW_SECONDS = 900.0
"""CloudWatch may show a minute some minutes late."""


def gpu_utilization(session: Any, state: RunState) -> dict[str, float]:
    """The newest minute of each host, in percent of one GPU; hosts that are not there are unknown.

    Where AWS refuses the metrics nothing is known: a watch does not end of it.
    """
    job = state.current.job if state.current else None
    if job is None or not job.live or job.started is None:
        return {}
    silent = [host for host in hosts_of(state) if not _tells(state, host)]
    try:
        gpus = instance_type(job.machines[0]).accelerators
    except UnknownInstanceTypeError:
        return {}
    if not silent or not gpus:
        return {}
    from sm_train.toolkit.aws.cloudwatch_metrics import instance_metrics

    now, there = state.now.timestamp(), for_region(session, job.region)
    begin, name = now - _WINDOW_SECONDS, "GPUUtilization"
    try:
        found = instance_metrics(there, job.name, silent, begin, now, now=now, names=[name])
    except UserError:
        return {}
    # CloudWatch adds up the GPUs of a machine.
    return {
        host: float(series.values[-1]) / gpus
        for (host, _), series in found.items()
        if series.values.size
    }


def hosts_of(state: RunState) -> list[str]:
    """The names of the live job's machines."""
    job = state.current.job if state.current else None
    return job.hosts if job is not None and job.live else []


def _tells(state: RunState, host: str) -> bool:
    said = state.live.figures.get(host)
    return said is not None and said.event["gpu_utilization_mean"] is not None
