"""Was the paid time used, did the job stall, how did it end, and did it cost what was said?"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from sm_train.cost.json_document import usd
from sm_train.cost.timeline import PARTS
from sm_train.toolkit.jobs.events import Event
from sm_train.toolkit.review.job_facts import JobFacts
from sm_train.toolkit.review.model import Level, Verdict, part_label
from sm_train.toolkit.terminal.formatting import format_duration, format_usd, format_usd_range

WELL_USED, POORLY_USED = 0.9, 0.75
"""Of the seconds, those of training. Llama 3's pre-training came to more than 90 % (The Llama 3
Herd of Models, 2024, section 3.3.4)."""

_SHORT_SECONDS = 3600.0
_SHOWN = 10

_MENDS = {
    "start_up": "keep machines between jobs (cluster.capacity: warm-pool), or take a smaller image",
    "restarts": "see what ended the earlier attempts: `sm-train diagnose {name}`",
    "lost_work": "save more often: lower checkpoint.every_steps",
    "stalls": "let stalled jobs be ended and started again: heartbeat.on_stall: kill",
    "checkpoints": "save less often: raise checkpoint.every_steps",
    "evaluation": "evaluate less often: raise evaluation.every_steps",
    "data_wait": "more loader processes (training.decode_workers), or latents that are "
    "computed once "
    "(`sm-train pack --latents`)",
    "shut_down": "see what was written after the last step",
}


def time_used(facts: JobFacts) -> Verdict:
    """The goodput: the share of the seconds in which new steps were made."""
    question = "Was the paid time used?" if facts.billed else "Was the time used?"
    line = facts.line
    if line is None:
        return Verdict(
            "time", "unknown", question, "the job's lines hold no start, so nothing accounts for it"
        )
    share = line.seconds["useful"] / facts.seconds
    level: Level = "good" if share >= WELL_USED else "warning" if share >= POORLY_USED else "bad"
    worst = max(PARTS, key=lambda part: line.seconds[part])
    what = "billed" if facts.billed else "logged"
    sentence = f"{share:.1%} of {format_duration(facts.seconds)} {what} went into training"
    if level != "good":
        sentence += f"; {format_duration(line.seconds[worst])} into {part_label(worst)}"
        if facts.seconds < _SHORT_SECONDS and worst == "start_up":
            sentence += ", which weighs much in a short job"
    return Verdict(
        "time",
        level,
        question,
        sentence,
        tuple(_parts(facts)),
        None if level == "good" else _mend(facts, worst),
    )


def _mend(facts: JobFacts, part: str) -> str | None:
    if part == "start_up" and not facts.billed:
        return None
    return _MENDS[part].format(name=facts.name)


def _parts(facts: JobFacts) -> Iterator[str]:
    assert facts.line is not None
    parts = facts.line.seconds
    for part, seconds in sorted(parts.items(), key=lambda one: -one[1]):
        if seconds <= 0:
            continue
        cost = facts.usd(seconds)
        told = f"{part_label(part)}: {format_duration(seconds)}, {seconds / facts.seconds:.1%}"
        yield told if cost is None else f"{told}, {format_usd(cost)}"
    if not facts.billed:
        yield "what came before the log's first line and after its last is not in it"


def stalls(facts: JobFacts) -> Verdict:
    """What its monitor reported, and the silences between its steps."""
    question = "Did it stall?"
    reported = facts.log.stalls
    silent = facts.line.seconds["stalls"] if facts.line else 0.0
    if not reported and silent <= 0:
        if facts.line is None:
            return Verdict("stalls", "unknown", question, "no line of the job tells")
        return Verdict("stalls", "good", question, "no: steps came without a long silence")
    cost = facts.usd(silent)
    lost = f", {format_duration(silent)} without progress" if silent else ""
    lost += f", {format_usd(cost)}" if cost else ""
    times = f"{len(reported)} times" if len(reported) != 1 else "once"
    sentence = f"yes, {times}{lost}" if reported else f"yes, unreported{lost}"
    ended = any(event.get("ends") for event in reported)
    short = not ended and silent < 0.01 * facts.seconds
    return Verdict(
        "stalls",
        "warning" if short else "bad",
        question,
        sentence,
        tuple(_stall(event) for event in reported[:_SHOWN]),
        f"stacks of every process are with the evidence; `sm-train diagnose {facts.name}` reads "
        "the logs"
        if reported
        else "heartbeats report a silence as it happens: see heartbeat in the run file",
    )


def _stall(event: Event) -> str:
    told = [f"{clock(event['time'])}: {event['message']}"]
    if event.get("evidence"):
        told.append(f"evidence in {event['evidence']}")
    return "; ".join(told)


def ending(facts: JobFacts) -> Verdict:
    """How the job stands, by SageMaker and by its own last word."""
    question = "How did it end?"
    end = facts.log.last("end")
    said = f"training ended at step {end['step']:,}: {end['reason']}" if end else None
    evidence = tuple(one for one in (said, *_errors(facts)) if one)
    if facts.ending is not None:
        return _by_sagemaker(facts, question, evidence)
    if end is not None and end["reason"] == "done":
        return Verdict("end", "good", question, "it did all of its iterations", evidence)
    if end is not None:
        return Verdict(
            "end", "warning", question, f"early, at step {end['step']:,}: {end['reason']}", evidence
        )
    return Verdict(
        "end",
        "warning",
        question,
        "its log stops without an end",
        evidence,
        f"`sm-train diagnose {facts.name}` says why, if it was no longer running",
    )


def _by_sagemaker(facts: JobFacts, question: str, evidence: tuple[str, ...]) -> Verdict:
    ending = facts.ending
    assert ending is not None
    if ending.status == "Failed":
        reason = f": {ending.failure}" if ending.failure else ""
        return Verdict(
            "end",
            "bad",
            question,
            f"it failed{reason}",
            evidence,
            f"`sm-train diagnose {facts.name}` names the cause",
        )
    if ending.secondary in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        return Verdict(
            "end",
            "bad",
            question,
            f"SageMaker ended it: {ending.secondary}",
            evidence,
            "raise cluster.max_runtime, and cluster.max_wait under spot; `sm-train resume` goes on",
        )
    if ending.status == "Completed":
        return Verdict("end", "good", question, "it completed", evidence)
    if ending.status == "Stopped":
        why = f" for {ending.stopped_for}" if ending.stopped_for else ""
        return Verdict(
            "end",
            "good" if facts.log.last("end") else "warning",
            question,
            f"it was stopped{why}",
            evidence,
        )
    return Verdict("end", "good", question, f"it has not: {ending.status}", evidence)


def _errors(facts: JobFacts) -> list[str]:
    return [str(event["message"]) for event in facts.log.events["error"][:_SHOWN]]


def cost(facts: JobFacts) -> Verdict:
    """The estimate of the iterations that were done against what was billed for them."""
    question = "Did it cost what was estimated?"
    billed, estimate = facts.money.billed, facts.money.estimate
    expected = None if estimate is None else usd(estimate.cost)
    if billed is None or estimate is None or not expected:
        missing = (
            "there is no run file with its stage"
            if estimate is None
            else ("its price is unknown" if billed is None else "no speed of it was known")
        )
        sentence = f"no estimate to hold it against: {missing}"
        if billed is not None:
            sentence = f"it cost {format_usd(billed)}; {sentence}"
        return Verdict("cost", "unknown", question, sentence, (facts.money.basis,))
    low, high = usd(estimate.low) or expected, usd(estimate.high) or expected
    level: Level = "good" if billed <= high else "warning" if billed <= 1.25 * high else "bad"
    share = billed / expected - 1
    compared = f"{abs(share):.0%} {'more' if share > 0 else 'less'} than"
    sentence = f"{format_usd(billed)}, {compared if abs(share) >= 0.005 else 'as'} the estimated "
    span_ = format_usd_range({"cost_low_usd": low, "cost_high_usd": high})
    return Verdict(
        "cost",
        level,
        question,
        f"{sentence}{format_usd(expected)} for as many iterations",
        (f"8 of 10 outcomes were expected within {span_}", facts.money.basis),
        None
        if level == "good"
        else "let the next estimate learn from it: `sm-train cost RUN "
        "--actual`, then `sm-train cost RUN --learn`",
    )


def clock(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M:%S} UTC"
