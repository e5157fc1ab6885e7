"""Judges GPU utilization, stragglers, and the health of GPUs, disks and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from sm_train.entrypoints.base.sagemaker_paths import host_name
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import Column, finite
from sm_train.toolkit.analysis.review.review_model import LEVELS, Level, Verdict
from sm_train.toolkit.terminal.formatting import format_number

GOOD_UTILIZATION, POOR_UTILIZATION = 0.9, 0.7
"""Shares of GPU time; BRIA reports over 98 % (AWS Machine Learning Blog, 2024)."""

SEVERE_STRAGGLER = 1.25
"""A rank's time outside collectives relative to that of the other ranks."""

BRIEF_SHARE, LASTING_SHARE = 0.05, 0.25
"""Shares of the watchdog's comparisons that name a rank: below the first it was a pause, from the
second on the rank is a straggler most of the time."""

EXTRA_DATA_WAIT = 0.05
"""Data wait share of a rank above the median at which the other ranks wait for it."""

THROTTLED_CLOCK = 0.9
"""A GPU whose clock is below this share of the median is throttled."""

FULL_PERCENT = 90.0
"""A disk or an instance's memory is full above this share."""

_MAX_SHOWN = 5


def utilization(facts: JobFacts) -> dict[str, tuple[Column, Column]]:
    """Return each instance's GPU utilization: times in Unix seconds, and shares of 1.

    CloudWatch's metric is the sum over all GPUs, up to 800 for 8; the job's own events log a mean.
    """
    gpus = facts.instance_type.accelerators if facts.instance_type else 0
    from_cloudwatch: dict[str, tuple[Column, Column]] = {
        instance: (series.times, series.values / (100.0 * gpus))
        for (instance, name), series in facts.metrics.items()
        if name == "GPUUtilization" and gpus
    }
    if from_cloudwatch:
        return from_cloudwatch
    from_events = {
        host_name(node, facts.instances or 0): (
            table["time"],
            table["gpu_utilization_mean"] / 100.0,
        )
        for node, table in facts.log.nodes.items()
    }
    return {name: pair for name, pair in from_events.items() if np.isfinite(pair[1]).any()}


def while_training(facts: JobFacts, times: Column, values: Column) -> Column:
    """Return the known values between the first and the last step event."""
    known = np.isfinite(values)
    if facts.training_span is not None:
        begin, end = facts.training_span
        known &= (times >= begin) & (times <= end)
    return values[known]


def gpus(facts: JobFacts) -> Verdict:
    question = "Were the GPUs busy?"
    means = {
        instance: float(training.mean())
        for instance, (times, shares) in utilization(facts).items()
        if len(training := while_training(facts, times, shares))
    }
    if not means:
        return Verdict("gpu", "unknown", question, _no_utilization(facts))
    mean = float(np.mean(list(means.values())))
    level: Level = (
        "good" if mean >= GOOD_UTILIZATION else "warning" if mean >= POOR_UTILIZATION else "bad"
    )
    by_share = sorted(means.items(), key=lambda item: item[1])
    evidence = [f"{instance}: {share:.1%}" for instance, share in by_share]
    return Verdict(
        "gpu",
        level,
        question,
        f"{mean:.1%} of the time during training",
        (f"{len(means)} instances, the least busy first", *evidence[:_MAX_SHOWN]),
        None if level == "good" else "check whether they wait for data, the network or checkpoints",
    )


def _no_utilization(facts: JobFacts) -> str:
    if facts.backend == "gloo":
        return "it ran on CPUs"
    return "neither CloudWatch nor the log contains GPU metrics"


@dataclass(frozen=True)
class RankTimes:
    """A rank's mean seconds per step outside collectives, None if unknown, and data wait share."""

    node: int
    rank: int
    busy: float | None
    data_wait: float

    def __str__(self) -> str:
        busy = "" if self.busy is None else f"computes {self.busy:.3g} s per step, "
        return f"rank {self.rank} on node {self.node}: {busy}waits {self.data_wait:.1%} for data"


def rank_times(facts: JobFacts) -> list[RankTimes]:
    """Return each rank's times over the job, the busiest first."""
    ranks = []
    for node, table in facts.log.ranks.items():
        for rank in np.unique(table["rank"]).tolist():
            rows = table["rank"] == rank
            busy = finite(table["busy_seconds"][rows])
            mean = float(busy.mean()) if len(busy) else None
            waits = finite(table["data_wait_share"][rows])
            wait = float(waits.mean()) if len(waits) else 0.0
            ranks.append(RankTimes(node, int(rank), mean, wait))
    return sorted(ranks, key=lambda rank: (-(rank.busy or 0.0), -rank.data_wait))


@dataclass(frozen=True)
class _Named:
    """A straggler that the watchdog named in ``share`` of its comparisons."""

    node: int
    rank: int | None
    ratio: float
    share: float

    @property
    def level(self) -> Level:
        lasting = self.share >= LASTING_SHARE and self.ratio >= SEVERE_STRAGGLER
        return "bad" if lasting else "warning"

    def __str__(self) -> str:
        who = f"node {self.node}" if self.rank is None else f"rank {self.rank} on node {self.node}"
        share = f"{self.share:.0%} of the time"
        return f"{who} computes {self.ratio:.2f} × as long as the others, {share}"


def _named_stragglers(facts: JobFacts) -> list[_Named]:
    """Return the stragglers named in more than a few comparisons, the worst first."""
    table = facts.log.stragglers
    # A whole node has no rank.
    ranks = np.nan_to_num(table["rank"], nan=-1.0)
    named = []
    for node, rank in sorted(set(zip(table["node"].tolist(), ranks.tolist(), strict=True))):
        rows = (table["node"] == node) & (ranks == rank)
        share = int(rows.sum()) / facts.log.comparisons
        ratio = float(np.median(table["ratio"][rows]))
        if share > BRIEF_SHARE:
            named.append(_Named(int(node), None if rank < 0 else int(rank), ratio, share))
    return sorted(named, key=lambda rank: -rank.share * rank.ratio)


def stragglers(facts: JobFacts) -> Verdict:
    """Find ranks that compute or wait for data longer than others, and GPUs at a lower clock.

    Whole steps take equally long on all ranks, which wait for each other, so that only the times
    outside collectives show a straggler.
    """
    question = "Were there stragglers?"
    ranks = rank_times(facts)
    if len(ranks) < 2:
        reason = "there is only one rank" if ranks else "the log has no metrics per rank"
        return Verdict("stragglers", "good" if ranks else "unknown", question, reason)
    data_wait = float(np.median([rank.data_wait for rank in ranks]))
    waiting = [rank for rank in ranks if rank.data_wait > data_wait + EXTRA_DATA_WAIT]
    throttled = list(_throttled(facts))
    named = _named_stragglers(facts) if facts.log.comparisons else []
    evidence = tuple(map(str, ranks[:_MAX_SHOWN]))
    if not named and not waiting and not throttled:
        if not facts.log.comparisons:
            reason = "the ranks' times outside collectives were not measured"
            return Verdict("stragglers", "unknown", question, reason, evidence)
        answer = f"no: none of {len(ranks)} ranks keeps the others waiting"
        return Verdict("stragglers", "good", question, answer, evidence)
    problems = [str(rank) for rank in named[:_MAX_SHOWN]]
    if waiting:
        worst = max(waiting, key=lambda rank: rank.data_wait)
        problems.append(
            f"rank {worst.rank} on node {worst.node} waits {worst.data_wait:.0%} of the time for "
            f"data, the others {data_wait:.0%}"
        )
    problems += throttled[:_MAX_SHOWN]
    return Verdict(
        "stragglers",
        min((rank.level for rank in named), key=LEVELS.index, default="warning"),
        question,
        f"yes: {'; '.join(problems)}",
        evidence,
        "all other ranks wait for it in every step: `sm-train doctor` tests its instance; stop and "
        "resume to get other instances",
    )


def _throttled(facts: JobFacts) -> Iterator[str]:
    """Describe GPUs whose median clock is below that of the others."""
    clocks = {
        (node, gpu): value for node, gpu, value in _gpu_medians(facts, "sm_clock") if value > 0
    }
    if len(clocks) < 2:
        return
    median = float(np.median(list(clocks.values())))
    for (node, gpu), value in sorted(clocks.items(), key=lambda pair: pair[1]):
        if value < THROTTLED_CLOCK * median:
            yield (
                f"GPU {gpu} of node {node} runs at {format_number(value)} MHz, the others at "
                f"{format_number(median)}"
            )


def _gpu_medians(facts: JobFacts, name: str) -> Iterator[tuple[int, int, float]]:
    """Yield (node rank, GPU, median) of a metric."""
    for node, table in facts.log.gpus.items():
        for gpu in np.unique(table["gpu"]).tolist():
            values = finite(table[name][table["gpu"] == gpu])
            if len(values):
                yield node, int(gpu), float(np.median(values))


def health(facts: JobFacts) -> Verdict:
    """Find GPU memory errors, and full disks or memory."""
    question = "Were the instances healthy?"
    nodes = facts.log.nodes
    ecc = {node: _max(table, "gpu_ecc_uncorrected") for node, table in nodes.items()}
    memory_errors = [
        f"node {node}: {errors:.0f} uncorrected GPU memory errors"
        for node, errors in ecc.items()
        if errors
    ]
    full = [
        f"{instance}: {resource} {float(series.values.max()):.0f} % full"
        for (instance, name), series in sorted(facts.metrics.items())
        if (resource := {"DiskUtilization": "disk", "MemoryUtilization": "memory"}.get(name))
        and float(series.values.max()) >= FULL_PERCENT
    ]
    if memory_errors or full:
        return Verdict(
            "health",
            "bad" if memory_errors else "warning",
            question,
            "; ".join([*memory_errors, *full][:_MAX_SHOWN]),
            (*memory_errors, *full),
            "stop and resume to get other instances"
            if memory_errors
            else "use a larger cluster.volume_gb, a smaller checkpoint.keep_last, or fewer "
            "training.decode_workers",
        )
    if not nodes and not facts.metrics:
        return Verdict("health", "unknown", question, "there are no metrics of the instances")
    hottest = max((_max(table, "gpu_temperature_max") for table in nodes.values()), default=0.0)
    evidence = (f"hottest GPU: {hottest:.0f} °C",) if hottest else ()
    return Verdict("health", "good", question, "no problems found", evidence)


def _max(table: Mapping[str, Column], name: str) -> float:
    values = finite(table[name])
    return float(values.max()) if len(values) else 0.0
