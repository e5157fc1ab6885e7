"""Were the GPUs busy, was one of them slow, and is one ill?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from sm_train.toolkit.jobs.live_state import STRAGGLER_RATIO
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import Column, finite
from sm_train.toolkit.review.model import Level, Verdict
from sm_train.toolkit.terminal.formatting import format_number

BUSY, IDLE = 0.9, 0.7
"""Shares of GPU time; BRIA reports over 98 % (AWS Machine Learning Blog, 2024)."""

MUCH_SLOWER = 1.25
"""A rank's step time against the median of all, as live_state's STRAGGLER_RATIO."""

WAITS = 0.05
"""A rank's share of waiting for data above the others' that makes them wait for it."""

CLOCK_DROP = 0.9
"""A GPU's clock against the median of all: below, it is throttled."""

FULL = 90.0
"""Percent of a disk or of a machine's memory."""

_SHOWN = 5


def utilization(facts: JobFacts) -> dict[str, tuple[Column, Column]]:
    """Each machine's GPUs: Unix seconds, and shares of 1 over all its GPUs.

    CloudWatch's figure is a sum over the GPUs, up to 800 on 8; else the job's own, a mean.
    """
    gpus = facts.machine.accelerators if facts.machine else 0
    found = {
        host: (series.times, series.values / (100.0 * gpus))
        for (host, name), series in facts.metrics.items()
        if name == "GPUUtilization" and gpus
    }
    if found:
        return found
    told = {
        f"algo-{node + 1}": (table["time"], table["gpu_utilization_mean"] / 100.0)
        for node, table in facts.log.nodes.items()
    }
    return {host: pair for host, pair in told.items() if np.isfinite(pair[1]).any()}


def while_training(facts: JobFacts, times: Column, values: Column) -> Column:
    """The known values between the first step's line and the last's."""
    known = np.isfinite(values)
    if facts.trains is not None:
        begin, end = facts.trains
        known &= (times >= begin) & (times <= end)
    return values[known]


def gpus(facts: JobFacts) -> Verdict:
    question = "Were the GPUs busy?"
    means = {
        host: float(training.mean())
        for host, (times, shares) in utilization(facts).items()
        if len(training := while_training(facts, times, shares))
    }
    if not means:
        return Verdict("gpu", "unknown", question, _no_gpus(facts))
    mean = float(np.mean(list(means.values())))
    level: Level = "good" if mean >= BUSY else "warning" if mean >= IDLE else "bad"
    evidence = [f"{host}: {share:.1%}" for host, share in sorted(means.items(), key=_by_share)]
    return Verdict(
        "gpu",
        level,
        question,
        f"{mean:.1%} of the time, while it trained",
        (f"the least busy of {len(means)} machines first", *evidence[:_SHOWN]),
        None if level == "good" else "see whether data, the network or checkpoints made them wait",
    )


def _by_share(pair: tuple[str, float]) -> float:
    return pair[1]


def _no_gpus(facts: JobFacts) -> str:
    if facts.backend == "gloo":
        return "it ran on CPUs"
    return "neither CloudWatch nor the job's lines tell of them"


@dataclass(frozen=True)
class _Rank:
    node: int
    rank: int
    p50: float
    waits: float


def _ranks(facts: JobFacts) -> list[_Rank]:
    """Each rank's median step and its share of waiting for data, over the whole job."""
    found = []
    for node, table in facts.log.ranks.items():
        for rank in np.unique(table["rank"]).tolist():
            rows = table["rank"] == rank
            steps, waits = finite(table["p50"][rows]), finite(table["data_wait_share"][rows])
            if len(steps):
                mean = float(waits.mean()) if len(waits) else 0.0
                found.append(_Rank(node, int(rank), float(np.median(steps)), mean))
    return found


def stragglers(facts: JobFacts) -> Verdict:
    """A rank that takes longer, one that waits for data alone, a GPU at a lower clock."""
    question = "Did one process hold up the others?"
    ranks = _ranks(facts)
    if len(ranks) < 2:
        reason = "there is only one" if ranks else "the job's lines hold no table of ranks"
        return Verdict("stragglers", "good" if ranks else "unknown", question, reason)
    usual, waits = np.median([one.p50 for one in ranks]), np.median([one.waits for one in ranks])
    slowest = max(ranks, key=lambda one: one.p50)
    ratio = slowest.p50 / float(usual)
    late = [one for one in ranks if one.waits > waits + WAITS]
    slow_clocks = list(_throttled(facts))
    evidence = [
        f"rank {one.rank} on node {one.node}: median step {one.p50:.3g} s, "
        f"{one.waits:.1%} of it waiting for data"
        for one in sorted(ranks, key=lambda one: (-one.p50, -one.waits))[:_SHOWN]
    ]
    if ratio <= STRAGGLER_RATIO and not late and not slow_clocks:
        return Verdict(
            "stragglers",
            "good",
            question,
            f"no: the slowest of {len(ranks)} takes {ratio:.2f} × the median",
            tuple(evidence),
        )
    told, level = [], "warning"
    if ratio > STRAGGLER_RATIO:
        level = "bad" if ratio > MUCH_SLOWER else "warning"
        told.append(f"rank {slowest.rank} on node {slowest.node} takes {ratio:.2f} × the median")
    if late:
        worst = max(late, key=lambda one: one.waits)
        told.append(
            f"rank {worst.rank} on node {worst.node} waits {worst.waits:.0%} of the time for data, "
            f"the others {waits:.0%}"
        )
    told += slow_clocks[:_SHOWN]
    return Verdict(
        "stragglers",
        "bad" if level == "bad" else "warning",
        question,
        "; ".join(told),
        tuple(evidence),
        "all others wait for it in every step: `sm-train doctor` examines its machine; stop and "
        "resume to have other ones",
    )


def _throttled(facts: JobFacts) -> Iterator[str]:
    clocks = {
        (node, gpu): value for node, gpu, value in _gpu_medians(facts, "sm_clock") if value > 0
    }
    if len(clocks) < 2:
        return
    usual = float(np.median(list(clocks.values())))
    for (node, gpu), value in sorted(clocks.items(), key=lambda pair: pair[1]):
        if value < CLOCK_DROP * usual:
            yield (
                f"GPU {gpu} of node {node} runs at {format_number(value)} MHz, the others at "
                f"{format_number(usual)}"
            )


def _gpu_medians(facts: JobFacts, name: str) -> Iterator[tuple[int, int, float]]:
    for node, table in facts.log.gpus.items():
        for gpu in np.unique(table["gpu"]).tolist():
            values = finite(table[name][table["gpu"] == gpu])
            if len(values):
                yield node, int(gpu), float(np.median(values))


def health(facts: JobFacts) -> Verdict:
    """Errors of GPU memory, and disks or memory that fill up."""
    question = "Were the machines well?"
    nodes = facts.log.nodes
    ecc = {node: _most(table, "gpu_ecc_uncorrected") for node, table in nodes.items()}
    told = [
        f"node {node}: {errors:.0f} uncorrected errors of GPU memory"
        for node, errors in ecc.items()
        if errors
    ]
    filling = [
        f"{host}: {what} {float(series.values.max()):.0f} % full"
        for (host, name), series in sorted(facts.metrics.items())
        if (what := {"DiskUtilization": "disk", "MemoryUtilization": "memory"}.get(name))
        and float(series.values.max()) >= FULL
    ]
    if told or filling:
        return Verdict(
            "health",
            "bad" if told else "warning",
            question,
            "; ".join([*told, *filling][:_SHOWN]),
            (*told, *filling),
            "resubmit on other machines: stop, then resume"
            if told
            else "a larger cluster.volume_gb, a smaller checkpoint.keep_last, or fewer "
            "training.decode_workers",
        )
    if not nodes and not facts.metrics:
        return Verdict("health", "unknown", question, "nothing tells of them")
    hottest = max((_most(table, "gpu_temperature_max") for table in nodes.values()), default=0.0)
    evidence = (f"hottest GPU: {hottest:.0f} °C",) if hottest else ()
    return Verdict("health", "good", question, "nothing was wrong with them", evidence)


def _most(table: Mapping[str, Column], name: str) -> float:
    values = finite(table[name])
    return float(values.max()) if len(values) else 0.0
