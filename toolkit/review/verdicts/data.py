"""Judges whether data loading limited the speed."""

from __future__ import annotations

import numpy as np
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import finite
from sm_train.toolkit.review.model import Level, Verdict
from sm_train.toolkit.terminal.formatting import format_number

GOOD_SHARE, WARNING_SHARE = 0.02, 0.1
"""Highest shares of a step spent waiting for its batch for each level."""

_MAX_NODES = 5


def data(facts: JobFacts) -> Verdict:
    question = "Was data loading the bottleneck?"
    known = finite(facts.log.steps["data_wait_share"])
    if not len(known):
        return Verdict("data", "unknown", question, "the log contains no steps")
    mean = float(known.mean())
    level: Level = "good" if mean <= GOOD_SHARE else "warning" if mean <= WARNING_SHARE else "bad"
    answer = "no" if level == "good" else "partly" if level == "warning" else "yes"
    return Verdict(
        "data",
        level,
        question,
        f"{answer}: {mean:.1%} of the time was spent waiting for batches",
        (f"slowest tenth of the intervals: {float(np.quantile(known, 0.9)):.1%}", *_by_node(facts)),
        None
        if level == "good"
        else "use more decoder threads (training.decode_workers), precomputed latents "
        "(`sm-train pack --latents`), or smaller images in the shards",
    )


def _by_node(facts: JobFacts) -> list[str]:
    """Describe the nodes that wait the most, with their read rates."""
    nodes = []
    for node, table in facts.log.nodes.items():
        waits = finite(table["data_wait_share_max"])
        rate = finite(table["read_bytes_per_second"])
        if len(waits):
            text = f"node {node}: its slowest rank waits {float(waits.mean()):.1%}"
            if len(rate):
                text += f", reading {format_number(float(rate.mean()) / 1e6)} MB/s"
            nodes.append((float(waits.mean()), text))
    return [text for _, text in sorted(nodes, reverse=True)[:_MAX_NODES]]
