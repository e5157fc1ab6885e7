"""Lists the job's warnings that no other question covers."""

from __future__ import annotations

from sm_train.toolkit.analysis.review.job_facts import JobFacts
from sm_train.toolkit.analysis.review.review_model import Verdict

_COVERED = ("stall", "stall-resolved", "step-skipped", "loss-non-finite", "rolled-back")
_SERIOUS = frozenset(
    {"checkpoint-failed", "checkpoints-not-stored", "node-lost", "rank-died", "shard-damaged"}
)
_MAX_SHOWN = 8


def warnings(facts: JobFacts) -> Verdict:
    question = "What warnings did the job log?"
    by_code = {
        code: warning
        for code, warning in facts.log.warnings.items()
        if code not in _COVERED and not code.startswith("doctor-")
    }
    if not facts.log.events["start"] and not by_code:
        return Verdict("warnings", "unknown", question, "the log contains no events")
    if not by_code:
        return Verdict("warnings", "good", question, "none")
    codes = ", ".join(
        f"{code} ({warning.count:,} ×)" if warning.count > 1 else code
        for code, warning in by_code.items()
    )
    return Verdict(
        "warnings",
        "bad" if _SERIOUS & by_code.keys() else "warning",
        question,
        codes,
        tuple(
            f"{code}: {warning.first[0]['message']}"
            for code, warning in list(by_code.items())[:_MAX_SHOWN]
        ),
    )
