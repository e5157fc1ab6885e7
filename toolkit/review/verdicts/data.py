"""Was data the limit?"""

from __future__ import annotations

import numpy as np
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.job_log import finite
from sm_train.toolkit.review.model import Level, Verdict
from sm_train.toolkit.terminal.formatting import format_number

LITTLE, MUCH = 0.02, 0.1
"""Shares of a step spent waiting for its batch."""

_SHOWN = 5


def data(facts: JobFacts) -> Verdict:
    question = "Was data the limit?"
    known = finite(facts.log.steps["data_wait_share"])
    if not len(known):
        return Verdict("data", "unknown", question, "no line tells of a step")
    mean = float(known.mean())
    level: Level = "good" if mean <= LITTLE else "warning" if mean <= MUCH else "bad"
    answer = "no" if level == "good" else "in part" if level == "warning" else "yes"
    return Verdict(
        "data",
        level,
        question,
        f"{answer}: {mean:.1%} of the time went into waiting for batches",
        (f"slowest tenth of the intervals: {float(np.quantile(known, 0.9)):.1%}", *_by_node(facts)),
        None
        if level == "good"
        else "more loader processes (training.decode_workers), latents that are "
        "computed once (`sm-train pack --latents`), or smaller images in the shards",
    )


def _by_node(facts: JobFacts) -> list[str]:
    """The machines that wait most, and how fast they read."""
    found = []
    for node, table in facts.log.nodes.items():
        waits = finite(table["data_wait_share_max"])
        rate = finite(table["read_bytes_per_second"])
        if len(waits):
            told = f"node {node}: its most waiting rank {float(waits.mean()):.1%}"
            if len(rate):
                told += f", reading {format_number(float(rate.mean()) / 1e6)} MB/s"
            found.append((float(waits.mean()), told))
    return [told for _, told in sorted(found, reverse=True)[:_SHOWN]]
