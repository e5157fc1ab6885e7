"""Judges whether data loading limited the speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.job_log import finite
from sm_train.toolkit.analysis.review.review_model import Level, Verdict
from sm_train.toolkit.terminal.formatting import format_number

GOOD_SHARE, WARNING_SHARE = 0.02, 0.1
"""Highest shares of a step spent waiting for its batch for each level."""

_MAX_NODES = 5

_FIX = (
    "use more decoders (training.decode_workers), precomputed latents (`sm-train pack --latents`), "
    "or smaller images in the shards"
)
ENTRY_DATA_FIX = "use more workers in the script's DataLoader, or smaller files"
"""The fix for a script of the user's own, which reads the data itself."""


def data(facts: JobFacts) -> Verdict:
    question = "Was data loading the bottleneck?"
    known = finite(facts.log.steps["data_wait_share"])
    mean = facts.timeline.data_wait_share if facts.timeline else None
    if mean is None or not len(known):
        return Verdict("data", "unknown", question, "the log contains no steps")
    nodes = _waits(facts)
    # All ranks wait for the one with the slowest data, so that the worst node decides.
    worst = max(nodes, key=lambda node: node.share, default=None)
    share = max(mean, worst.share if worst else 0.0)
    level: Level = "good" if share <= GOOD_SHARE else "warning" if share <= WARNING_SHARE else "bad"
    answer = "no" if level == "good" else "partly" if level == "warning" else "yes"
    sentence = f"{answer}: {mean:.1%} of the time was spent waiting for batches"
    if worst is not None and worst.share > mean and len(nodes) > 1:
        sentence += f", {worst.share:.1%} on node {worst.node}"
    return Verdict(
        "data",
        level,
        question,
        sentence,
        (
            f"slowest tenth of the intervals: {float(np.quantile(known, 0.9)):.1%}",
            *(str(node) for node in sorted(nodes, key=lambda node: -node.share)[:_MAX_NODES]),
        ),
        None if level == "good" else ENTRY_DATA_FIX if has_own_script(facts) else _FIX,
    )


def has_own_script(facts: JobFacts) -> bool:
    """Return whether the job ran a script of the user's own (``entry``)."""
    start = facts.log.last("start")
    return start is not None and start.get("entry") is not None


@dataclass(frozen=True)
class _NodeWait:
    """The mean share of time that a node's slowest rank waits, and the node's read rate."""

    node: int
    share: float
    bytes_per_second: float | None

    def __str__(self) -> str:
        text = f"node {self.node}: its slowest rank waits {self.share:.1%}"
        if self.bytes_per_second is None:
            return text
        return f"{text}, reading {format_number(self.bytes_per_second / 1e6)} MB/s"


def _waits(facts: JobFacts) -> list[_NodeWait]:
    nodes = []
    for node, table in facts.log.nodes.items():
        waits = finite(table["data_wait_share_max"])
        rate = finite(table["read_bytes_per_second"])
        if len(waits):
            mean_rate = float(rate.mean()) if len(rate) else None
            nodes.append(_NodeWait(node, float(waits.mean()), mean_rate))
    return nodes
