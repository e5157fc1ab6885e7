"""Judges how well the paid time was used, stalls, the job's outcome, and its cost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from sm_train.cost.json_document import usd
from sm_train.cost.timeline import PARTS
from sm_train.toolkit.analysis.diagnose.diagnosis import Diagnosis
from sm_train.toolkit.analysis.review.job_facts import JobFacts, JobOutcome
from sm_train.toolkit.analysis.review.review_model import Level, Verdict, part_label
from sm_train.toolkit.analysis.review.verdicts.data import ENTRY_DATA_FIX, has_own_script
from sm_train.toolkit.records.job_logs import Event
from sm_train.toolkit.terminal.formatting import format_duration, format_usd, format_usd_range

GOOD_GOODPUT, POOR_GOODPUT = 0.9, 0.75
"""Shares of the time spent training. Llama 3's pre-training exceeded 90 % (The Llama 3 Herd of
Models, 2024, section 3.3.4)."""

_SHORT_SECONDS = 3600.0
_MAX_EVENTS = 10
_MAX_LINES = 3
_SHORT_FIX = "check the program's own limit of steps or epochs, and the end of its data"

_FIXES = {
    "start_up": "keep instances between jobs (cluster.capacity: warm-pool), or use a smaller image",
    "restarts": "find out what ended the earlier attempts: {command}",
    "lost_work": "save more often: lower checkpoint.every_steps",
    "stalls": "have stalled jobs killed and restarted: heartbeat.on_stall: kill",
    "checkpoints": "save less often: raise checkpoint.every_steps",
    "evaluation": "evaluate less often: raise evaluation.every_steps",
    "data_wait": "use more decoders (training.decode_workers), or precomputed latents "
    "(`sm-train pack --latents`)",
    "shut_down": "check what is written after the last step",
}
"""Part of the timeline (cost.timeline) → what reduces it."""

_ENTRY_FIXES = {
    "lost_work": "have the script save more often",
    "checkpoints": "have the script save less often",
    "data_wait": ENTRY_DATA_FIX,
}
"""The same for a script of the user's own, where keys of the run file do not apply."""


def goodput(facts: JobFacts) -> Verdict:
    """Judge the share of the time in which the job made new steps."""
    question = "Was the paid time well used?" if facts.billed else "Was the time well used?"
    timeline = facts.timeline
    if timeline is None:
        return Verdict(
            "time",
            "unknown",
            question,
            "the log has no start event, so the time is unaccounted for",
        )
    share = timeline.seconds["useful"] / facts.seconds
    level: Level = (
        "good" if share >= GOOD_GOODPUT else "warning" if share >= POOR_GOODPUT else "bad"
    )
    worst = max(PARTS, key=lambda part: timeline.seconds[part])
    kind = "billed" if facts.billed else "logged"
    sentence = f"{share:.1%} of {format_duration(facts.seconds)} {kind} was spent training"
    if level != "good":
        sentence += f"; {format_duration(timeline.seconds[worst])} on {part_label(worst)}"
        if facts.seconds < _SHORT_SECONDS and worst == "start_up":
            sentence += ", a large share in a short job"
    return Verdict(
        "time",
        level,
        question,
        sentence,
        tuple(_parts(facts)),
        None if level == "good" else _goodput_fix(facts, worst),
    )


def _goodput_fix(facts: JobFacts, part: str) -> str | None:
    if part == "start_up" and not facts.billed:
        return None
    fixes = _FIXES | _ENTRY_FIXES if has_own_script(facts) else _FIXES
    return fixes[part].format(command=facts.diagnose_command)


def _parts(facts: JobFacts) -> Iterator[str]:
    assert facts.timeline is not None
    parts = facts.timeline.seconds
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if seconds <= 0:
            continue
        cost = facts.usd(seconds)
        text = f"{part_label(part)}: {format_duration(seconds)}, {seconds / facts.seconds:.1%}"
        yield text if cost is None else f"{text}, {format_usd(cost)}"
    if not facts.billed:
        yield "time before the first and after the last line of the log is not included"


def stalls(facts: JobFacts) -> Verdict:
    """Judge the stalls that the watchdog reported, and long gaps between steps."""
    question = "Did it stall?"
    reported = facts.log.stalls
    silent = facts.timeline.seconds["stalls"] if facts.timeline else 0.0
    if not reported and silent <= 0:
        if facts.timeline is None:
            return Verdict("stalls", "unknown", question, "the log has no start event")
        return Verdict("stalls", "good", question, "no: there was no long gap between steps")
    cost = facts.usd(silent)
    lost = f", {format_duration(silent)} without progress" if silent else ""
    lost += f", {format_usd(cost)}" if cost else ""
    times = f"{len(reported)} times" if len(reported) != 1 else "once"
    sentence = f"yes, {times}{lost}" if reported else f"yes, unreported{lost}"
    killed = any(event.get("ends") for event in reported)
    short = not killed and silent < 0.01 * facts.seconds
    return Verdict(
        "stalls",
        "warning" if short else "bad",
        question,
        sentence,
        tuple(_stall(event) for event in reported[:_MAX_EVENTS]),
        f"the evidence includes the stacks of all processes; {facts.diagnose_command} "
        "analyzes the logs"
        if reported
        else "enable heartbeats to report stalls as they happen: see heartbeat in the run file",
    )


def _stall(event: Event) -> str:
    text = f"{format_utc(event['time'])}: {event['message']}"
    return f"{text}; evidence in {event['evidence']}" if event.get("evidence") else text


def outcome(facts: JobFacts) -> Verdict:
    """Judge how the job ended: by its diagnosis, its platform's status, or its last event."""
    question = "How did it end?"
    end = facts.log.last("end")
    reason = f"training ended at step {end['step']:,}: {end['reason']}" if end else None
    errors = (str(event["message"]) for event in facts.log.events["error"][:_MAX_EVENTS])
    evidence = tuple(text for text in (reason, *errors) if text)
    diagnosis, status = facts.diagnosis, facts.outcome
    if diagnosis is not None and diagnosis.first is not None and diagnosis.cause != "terminated":
        return _failure(diagnosis, facts, question, evidence)
    if status is not None:
        return _reported_outcome(facts, status, question, evidence)
    if end is not None and end["reason"] == "done":
        if missing := _missing_steps(facts):
            return Verdict("end", "warning", question, f"it ended {missing}", evidence, _SHORT_FIX)
        # A script of the user's own may train without steps that are observed.
        sentence = "it completed all steps" if end["step"] else "it ended without an error"
        return Verdict("end", "good", question, sentence, evidence)
    if end is not None:
        return Verdict(
            "end", "warning", question, f"early, at step {end['step']:,}: {end['reason']}", evidence
        )
    failed = bool(facts.log.events["error"])
    return Verdict(
        "end",
        "bad" if failed else "warning",
        question,
        "it failed for an unknown reason" if failed else "the log has no end event",
        (*evidence, *(_last_lines(diagnosis) if diagnosis else ())),
        f"{facts.diagnose_command} shows the lines to look at"
        if failed
        else f"if it is no longer running, {facts.diagnose_command} shows why",
    )


def _missing_steps(facts: JobFacts) -> str:
    """Describe how far a job came that ended as done before its last step, "" for others."""
    start, end = facts.log.last("start"), facts.log.last("end")
    steps = start.get("max_steps") if start else None
    if not steps or not end or end["reason"] != "done" or not 0 < end["step"] < steps:
        return ""
    return f"early, at step {end['step']:,} of {steps:,}"


def _failure(
    diagnosis: Diagnosis, facts: JobFacts, question: str, evidence: tuple[str, ...]
) -> Verdict:
    """Return the verdict on a job whose cause of failure is known."""
    first = diagnosis.first
    assert first is not None
    rank = None if first.rank is None else f"rank {first.rank}"
    where = ", ".join(part for part in (first.node, rank) if part)
    reported = facts.outcome.failure if facts.outcome else ""
    return Verdict(
        "end",
        "bad",
        question,
        f"it failed: {diagnosis.title}",
        (
            f"first failure{f' ({where})' if where else ''}: {first.line}",
            *(
                (f"{facts.outcome.platform} reports: {reported}",)
                if facts.outcome and reported
                else ()
            ),
            *evidence,
        ),
        diagnosis.action,
    )


def _last_lines(diagnosis: Diagnosis) -> tuple[str, ...]:
    return tuple(match.text for match in diagnosis.evidence[-_MAX_LINES:])


def _reported_outcome(
    facts: JobFacts, job_outcome: JobOutcome, question: str, evidence: tuple[str, ...]
) -> Verdict:
    if job_outcome.status == "Failed":
        reason = f": {job_outcome.failure}" if job_outcome.failure else ""
        return Verdict(
            "end",
            "bad",
            question,
            f"it failed{reason}",
            evidence,
            f"{facts.diagnose_command} finds the cause",
        )
    if job_outcome.secondary in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        return Verdict(
            "end",
            "bad",
            question,
            f"{job_outcome.platform} stopped it: {job_outcome.secondary}",
            evidence,
            "raise cluster.max_runtime, or cluster.max_wait for spot; `sm-train resume` continues",
        )
    if job_outcome.status == "Completed":
        if missing := _missing_steps(facts):
            sentence = f"it completed {missing}"
            return Verdict("end", "warning", question, sentence, evidence, _SHORT_FIX)
        return Verdict("end", "good", question, "it completed", evidence)
    if job_outcome.status == "Stopped":
        why = f" for {job_outcome.stopped_for}" if job_outcome.stopped_for else ""
        return Verdict(
            "end",
            "good" if facts.log.last("end") else "warning",
            question,
            f"it was stopped{why}",
            evidence,
        )
    return Verdict("end", "good", question, f"not ended yet: {job_outcome.status}", evidence)


def cost(facts: JobFacts) -> Verdict:
    """Compare the billed cost with the estimate for the steps that were completed."""
    question = "Did it cost what was estimated?"
    billed, estimate = facts.cost.billed, facts.cost.estimate
    expected = None if estimate is None else usd(estimate.cost)
    if billed is None or estimate is None or not expected:
        missing = (
            "no run file contains its stage"
            if estimate is None
            else ("its price is unknown" if billed is None else "its speed was unknown")
        )
        sentence = f"no estimate to compare with: {missing}"
        if billed is not None:
            sentence = f"it cost {format_usd(billed)}; {sentence}"
        return Verdict("cost", "unknown", question, sentence, (facts.cost.basis,))
    low, high = usd(estimate.low) or expected, usd(estimate.high) or expected
    level: Level = "good" if billed <= high else "warning" if billed <= 1.25 * high else "bad"
    share = billed / expected - 1
    compared = f"{abs(share):.0%} {'more' if share > 0 else 'less'} than"
    sentence = f"{format_usd(billed)}, {compared if abs(share) >= 0.005 else 'equal to'} the "
    interval = format_usd_range({"cost_low_usd": low, "cost_high_usd": high})
    return Verdict(
        "cost",
        level,
        question,
        f"{sentence}{format_usd(expected)} estimated for the same number of steps",
        (f"estimated 80 % interval: {interval}", facts.cost.basis),
        None
        if level == "good"
        else "calibrate the next estimate: `sm-train cost RUN --actual`, then "
        "`sm-train cost RUN --learn`",
    )


def format_utc(time: float) -> str:
    """Format Unix seconds as a date and time in UTC."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
