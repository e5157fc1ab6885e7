"""Determines the node and the rank of a match, also from other lines of the same node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sm_train.entrypoints.base.sagemaker_paths import host_names
from sm_train.toolkit.analysis.diagnose.matches import Match, ScanReport, TorchrunFailure
from sm_train.toolkit.analysis.diagnose.signatures import signatures

_ALGO = re.compile(r"algo-(\d+)$")
_GPUS_PER_INSTANCE = (8, 4, 1, 16, 2)
"""Ranks per node of SageMaker's instance types, the most frequent first."""
_SRUN_ERROR = "srun: error: "
_SEEN_BY_PEERS = {
    *("nccl-timeout", "nccl-system-error", "gloo-timeout", "gloo-connect", "store-timeout"),
    *("node-lost", "ray-worker-died", "stall", "terminated"),
}
"""Consequences of a failure that processes other than the failed one report."""


@dataclass(frozen=True)
class FirstFailing:
    """The node and rank that failed first, as far as known; ``time`` in Unix seconds."""

    node: str | None
    rank: int | None
    time: float | None
    line: str


def first_failing(
    match: Match, matches: Sequence[Match], reports: Sequence[ScanReport]
) -> FirstFailing:
    """Return the origin of ``match``; other lines of its node provide a missing rank or time."""
    [report] = [report for report in reports if report.stream == match.stream]
    node, time = match.node, match.time
    summary = _summary(report, node)
    if summary is not None:
        time = time if match.exact and time is not None else summary.time or time
        if node is None and summary.host and _ALGO.match(summary.host):
            node = summary.host
    return FirstFailing(node, _rank(match, node, matches, reports, report), time, match.text)


def _summary(report: ScanReport, node: str | None) -> TorchrunFailure | None:
    """Return torchrun's summary, unless the launcher of a node other than ``node`` printed it."""
    summary = report.first_failure
    if summary is None or node is None or summary.node in (None, node):
        return summary
    return None


def _rank(
    match: Match,
    node: str | None,
    matches: Sequence[Match],
    reports: Sequence[ScanReport],
    report: ScanReport,
) -> int | None:
    if match.rank is not None:
        return match.rank
    summary = _summary(report, node)
    if summary is not None and summary.rank is not None:
        return summary.rank
    related = _related(match, matches)
    ranks = {other.rank for other in related if other.rank is not None}
    if len(ranks) == 1:
        return ranks.pop()
    # torchrun and others report only the local rank of the process that failed.
    local = match.local_rank
    if local is None:
        local = next(
            (
                other.local_rank
                for other in matches
                if other.stream == match.stream
                # A launcher's lines may lack the node that those of a library name.
                and other.node in (match.node, None)
                and other.local_rank is not None
            ),
            None,
        )
    if local is not None:
        first = _first_rank(node, reports)
        return None if first is None else first + local
    return _task(match, related, reports)


def _task(match: Match, related: Sequence[Match], reports: Sequence[ScanReport]) -> int | None:
    """Return the Slurm task of ``match`` if it is a rank.

    `srun` starts either every rank or one launcher per node. A launcher's processes write their
    ranks, and its own end is reported only by `srun: error: NODE: task N: …`.
    """
    if match.task is not None and not match.text.startswith(_SRUN_ERROR):
        return match.task
    tasks = {other.task for other in (match, *related) if other.task is not None}
    has_ranks = any(ranks for report in reports for ranks in report.ranks.values())
    return tasks.pop() if len(tasks) == 1 and not has_ranks else None


def _related(match: Match, matches: Sequence[Match]) -> list[Match]:
    """Return matches of the same failure and its consequences in the log of the same node.

    The kernel, NCCL and C++ report failures without the rank that Python reports next.
    """
    signature = signatures().get(match.code)
    explained = signature.explains if signature is not None else frozenset()
    codes = {match.code} | (explained - _SEEN_BY_PEERS)
    return [
        other
        for other in matches
        if other.code in codes
        and other.stream == match.stream
        and (match.node is None or other.node in (match.node, None))
    ]


def _first_rank(node: str | None, reports: Sequence[ScanReport]) -> int | None:
    """Return the lowest rank of ``node``, None if it is unknown."""
    seen = [(name or report.node, ranks) for report in reports for name, ranks in _ranks(report)]
    indices = _node_ranks([node, *(name for name, _ in seen)], reports)
    index = indices.get(node)
    if index is None and len(reports) == 1 and not any(name for name, _ in seen):
        # A single log that names no node: of a single node, unless it shows other ranks.
        ranks = [rank for _, more in seen for rank in more]
        per_node = next((n for n in _GPUS_PER_INSTANCE if ranks and _fits(n, ranks)), 1)
        return min(ranks) // per_node * per_node if ranks else 0
    if index is None or index == 0:
        return index
    known = {report.ranks_per_node for report in reports if report.ranks_per_node}
    if len(known) == 1:
        return index * known.pop()
    fitting = [
        per_node
        for per_node in _GPUS_PER_INSTANCE
        if all(
            rank // per_node == indices[name]
            for name, ranks in seen
            if name in indices
            for rank in ranks
        )
        and any(indices.get(name) for name, ranks in seen if ranks)
    ]
    return index * fitting[0] if len(fitting) == 1 else None


def _node_ranks(
    names: Sequence[str | None], reports: Sequence[ScanReport]
) -> dict[str | None, int]:
    """Return the rank of each node that is named ``algo-N``, in SageMaker's order of the names.

    A job has at least as many nodes as its start event or the highest number in a name says.
    """
    numbers = {name: int(parsed[1]) for name in names if name and (parsed := _ALGO.match(name))}
    count = max([*numbers.values(), *(report.nodes for report in reports)], default=0)
    order = {name: index for index, name in enumerate(host_names(count))}
    return {name: order[f"algo-{number}"] for name, number in numbers.items() if number}


def _fits(per_node: int, ranks: Sequence[int]) -> bool:
    """Return whether all ``ranks`` may be on one node."""
    return len({rank // per_node for rank in ranks}) == 1


def _ranks(report: ScanReport) -> Iterator[tuple[str | None, frozenset[int]]]:
    yield from report.ranks.items()
