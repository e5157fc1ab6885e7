"""What did the job itself warn of, that no other question is about?"""

from __future__ import annotations

from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.model import Verdict

_ELSEWHERE = ("stall", "stall-resolved", "step-skipped", "loss-not-finite", "rolled-back")
_SERIOUS = frozenset({"checkpoint-failed", "rank-died", "shard-damaged"})
_SHOWN = 8


def warnings(facts: JobFacts) -> Verdict:
    question = "What did the job warn of?"
    found = {
        code: warned
        for code, warned in facts.log.warnings.items()
        if code not in _ELSEWHERE and not code.startswith("doctor-")
    }
    if not facts.log.events["start"] and not found:
        return Verdict("warnings", "unknown", question, "no line of the job tells")
    if not found:
        return Verdict("warnings", "good", question, "of nothing")
    codes = ", ".join(
        f"{code} ({one.count:,} ×)" if one.count > 1 else code for code, one in found.items()
    )
    return Verdict(
        "warnings",
        "bad" if _SERIOUS & found.keys() else "warning",
        question,
        codes,
        tuple(f"{code}: {one.first[0]['message']}" for code, one in list(found.items())[:_SHOWN]),
    )
