"""Why a job failed: judges what the logs of its nodes say, and names the first that failed.

A cause outranks an exception that nothing explains, that one a symptom, and echoes (what the other
processes say when one has died) are never the cause. Among causes the earliest counts. Where they
contradict each other, or only echoes are left, the answer is ``unknown`` with the lines that a
person would look at: a wrong cause costs more than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sm_train.toolkit.diagnose.hits import PROGRAM_ERROR, LogStream, Match, Report
from sm_train.toolkit.diagnose.log_scanner import scan
from sm_train.toolkit.diagnose.signatures import Confidence, signatures

NO_FAILURE, UNKNOWN = "no-failure", "unknown"

_MOST_LINES = 10
_SKEW_SECONDS = 5.0
"""So much may the clocks of two nodes differ: closer than this, no order is read from them."""
_NEARBY_SECONDS = 60.0
"""The same where a time is only that of a line shortly before."""
_OUTLIVED_SECONDS = 60.0
"""A step that another node reports so long after a hit says that the hit did no harm."""
_TALKED_ON = 100
"""So many lines between two failures of one log: the first did not end the program."""
_FAR_FROM_END = 2000
"""So many lines after which nothing else went wrong: the hit did not end the process."""
_EXCEPTION = re.compile(r"(?:[\w.]+\.)?\w+(?:Error|Exception): ")
_COLLECTIVE = re.compile(r"\[Rank (\d+)\].*SeqNum=(\d+), OpType=(\w+)")


@dataclass(frozen=True)
class FirstFailing:
    """Who failed first, as far as known; ``time`` in Unix seconds."""

    node: str | None
    rank: int | None
    time: float | None
    line: str


@dataclass(frozen=True)
class Diagnosis:
    """``cause`` is a signature's code, ``program-error``, ``unknown`` or ``no-failure``."""

    cause: str
    title: str
    confidence: Confidence | None = None
    first: FirstFailing | None = None
    retryable: bool | None = None
    action: str | None = None
    evidence: tuple[Match, ...] = ()
    notes: tuple[str, ...] = ()


def diagnose(
    streams: Iterable[LogStream], earlier: Sequence[Sequence[LogStream]] = ()
) -> Diagnosis:
    """Judge the logs of one attempt, and mention how the ``earlier`` attempts ended."""
    found = judge([scan(stream) for stream in streams])
    before = [judge([scan(stream) for stream in attempt]) for attempt in earlier]
    notes = [f"attempt {number}: {one.title} ({one.cause})" for number, one in enumerate(before, 1)]
    return replace(found, notes=(*notes, *found.notes))


def succeeded() -> Diagnosis:
    """What there is to say of a job that SageMaker calls completed."""
    return Diagnosis(NO_FAILURE, "No failure found: the run succeeded")


def judge(reports: Sequence[Report]) -> Diagnosis:
    """What the reports of one attempt's streams say together."""
    hits = _in_order(hit for report in reports for hit in report.hits if _counts(hit, reports))
    notes = _notes(reports)
    causes = _unexplained([hit for hit in hits if hit.role == "cause"], hits)
    exceptions = [hit for hit in hits if hit.role == "exception"]
    symptoms = _unexplained([hit for hit in hits if hit.role == "symptom"], hits)
    if any(hit.code == "peer-gone" for hit in hits):
        # When a node fails, SageMaker ends the others.
        symptoms = [hit for hit in symptoms if hit.code != "terminated"]
    if not causes and not exceptions and any(report.succeeded for report in reports):
        return replace(succeeded(), notes=notes)
    if causes:
        rivals = _rivals(causes)
        if rivals:
            said = " and ".join(signatures()[code].title for code in rivals)
            return _unknown(reports, hits, (*notes, f"contradictory: {said}"))
        return _of_signature(causes[0], reports, hits, notes)
    if exceptions:
        return _of_exception(exceptions[0], reports, hits, notes)
    if symptoms:
        return _of_signature(_behind(symptoms), reports, hits, (*notes, *_laggards(symptoms)))
    seen = [report.first_failure for report in reports if report.first_failure]
    if hits or seen:
        left = [
            f"torchrun saw rank {one.rank} fail first, exit code {one.exit_code}" for one in seen
        ]
        echoes = "only echoes of another process's end: the first failing node's log may be missing"
        return _unknown(reports, hits, (*notes, *(left or [echoes])))
    return Diagnosis(NO_FAILURE, "No failure found", notes=notes)


# ------------------------------------------------------------------ which hits count


def _counts(hit: Match, reports: Sequence[Report]) -> bool:
    """Whether the job may have ended by ``hit``."""
    if (
        hit.exact
        and hit.time is not None
        and any(
            other.last_step_time is not None and hit.time + _OUTLIVED_SECONDS < other.last_step_time
            for other in reports
            if other.stream != hit.stream
        )
    ):
        return False
    [own] = [report for report in reports if report.stream == hit.stream]
    later = [other for other in own.hits if other.order > hit.order and other.code != hit.code]
    if not later:
        # A failure leaves more than one word behind: one step that comes after it is enough.
        goes_on = own.steps > hit.steps_before
        return not goes_on and own.lines - own.latest[hit.code] <= _FAR_FROM_END
    return not _was_handled(hit, later[0])


def _was_handled(hit: Match, following: Match) -> bool:
    """Whether the program went on talking after ``hit`` until something else happened to it.

    What ends a process is followed by the launcher's and the peers' words, within few lines.
    """
    if hit.role not in ("cause", "exception"):
        return False
    between = following.order - hit.order
    if following.role not in ("cause", "exception"):
        return between > _FAR_FROM_END
    if following.code in _explained_by(hit):
        return False
    only_told = _EXCEPTION.match(hit.text) and not hit.uncaught and following.uncaught
    return bool(only_told) or between > _TALKED_ON


def _explained_by(hit: Match) -> frozenset[str]:
    table = signatures()
    return table[hit.code].explains if hit.code in table else frozenset()


def _in_order(hits: Iterable[Match]) -> list[Match]:
    """By time; those without one keep their stream's order, after the others."""
    return sorted(hits, key=lambda hit: (hit.time is None, hit.time or 0.0, hit.stream, hit.order))


def _unexplained(hits: list[Match], everything: list[Match]) -> list[Match]:
    """``hits`` without the consequences of others."""
    table = signatures()
    codes = {hit.code for hit in everything if hit.role in ("cause", "symptom")}
    explained = {code for one in codes for code in table[one].explains}
    return [hit for hit in hits if hit.code not in explained]


def _rivals(causes: list[Match]) -> list[str]:
    """The codes of the first cause and of those that may as well have come first."""
    first = causes[0]
    rivals = [first.code]
    for hit in causes[1:]:
        if hit.code in rivals or hit.stream == first.stream:
            continue
        near = _SKEW_SECONDS if hit.exact and first.exact else _NEARBY_SECONDS
        if hit.time is None or first.time is None or hit.time - first.time <= near:
            rivals.append(hit.code)
    return rivals if len(rivals) > 1 else []


def _behind(symptoms: list[Match]) -> Match:
    """The first symptom; of collectives that timed out, that of the one rank that is behind."""
    first = symptoms[0]
    places = _collectives(symptoms)
    if first.code != "nccl-timeout" or len(set(places.values())) < 2:
        return first
    if len({kind for _, kind in places.values()}) > 1:
        return first
    lowest = min(number for number, _ in places.values())
    slow = [rank for rank, (number, _) in places.items() if number == lowest]
    return next(
        (hit for hit in symptoms if len(slow) == 1 and hit.rank == slow[0]),
        first,
    )


def _collectives(symptoms: list[Match]) -> dict[int, tuple[int, str]]:
    """Rank → the number and kind of the collective that timed out there."""
    found: dict[int, tuple[int, str]] = {}
    for hit in symptoms:
        if hit.code == "nccl-timeout" and (said := _COLLECTIVE.search(hit.text)):
            found.setdefault(int(said[1]), (int(said[2]), said[3]))
    return found


def _laggards(symptoms: list[Match]) -> tuple[str, ...]:
    """In words: which rank waits in which collective, where they differ or one is silent."""
    places = _collectives(symptoms)
    if symptoms[0].code != "nccl-timeout" or not places:
        return ()
    groups: dict[tuple[int, str], list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault(place, []).append(rank)
    silent = sorted(set(range(max(places) + 1)) - set(places))
    notes = []
    if len(groups) > 1:
        waiting = "; ".join(
            f"{_ranks(ranks)} in {kind} {number}"
            for (number, kind), ranks in sorted(groups.items())
        )
        notes.append(f"the ranks wait in different collectives: {waiting}")
    if silent and len(silent) < len(places):
        notes.append(f"no time-out from {_ranks(silent)}: look there first")
    return tuple(notes)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


# ------------------------------------------------------------------ what is answered


def _of_signature(
    hit: Match, reports: Sequence[Report], hits: list[Match], notes: tuple[str, ...]
) -> Diagnosis:
    one = signatures()[hit.code]
    return Diagnosis(
        cause=one.code,
        title=one.title,
        confidence=one.confidence,
        first=_first(hit, reports),
        retryable=one.retryable,
        action=one.action,
        evidence=_evidence(hit, hits),
        notes=notes,
    )


def _of_exception(
    hit: Match, reports: Sequence[Report], hits: list[Match], notes: tuple[str, ...]
) -> Diagnosis:
    return Diagnosis(
        cause=PROGRAM_ERROR,
        title=f"The program raised {hit.text}",
        confidence="medium",
        first=_first(hit, reports),
        retryable=False,
        action="Read the traceback that ends with this line; the same input will raise it again.",
        evidence=_evidence(hit, hits),
        notes=notes,
    )


def _first(hit: Match, reports: Sequence[Report]) -> FirstFailing:
    """Who said ``hit``; torchrun's summary of the same stream helps where it does not say."""
    [report] = [one for one in reports if one.stream == hit.stream]
    rank, time = hit.rank, hit.time
    summary = report.first_failure
    if summary is not None:
        rank = summary.rank if rank is None else rank
        time = time if hit.exact and time is not None else summary.time or time
    return FirstFailing(hit.node, rank, time, hit.text)


def _evidence(hit: Match, hits: list[Match]) -> tuple[Match, ...]:
    """The line itself, then the first of every other kind and of other ranks, by time."""
    chosen, seen = [hit], {(hit.code, hit.text)}
    kinds = {hit.code: 1}
    for other in hits:
        if (other.code, other.text) in seen or kinds.get(other.code, 0) >= 3:
            continue
        seen.add((other.code, other.text))
        kinds[other.code] = kinds.get(other.code, 0) + 1
        chosen.append(other)
    return (hit, *_in_order(chosen[1:_MOST_LINES]))


def _unknown(reports: Sequence[Report], hits: list[Match], notes: tuple[str, ...]) -> Diagnosis:
    """The ten lines to look at: what looks like an error at the end of each stream."""
    lines = [hit for hit in hits if hit.role in ("cause", "exception")]
    share = max(2, _MOST_LINES // max(1, len(reports)))
    for report in reports:
        last = report.last_lines()
        errors = [line for line in last if line.role == "symptom"]
        texts: dict[str, Match] = {}
        for line in errors or last[-share:]:
            texts.setdefault(line.text, line)
        lines += list(texts.values())[:share]
    unique = {(line.stream, line.order): line for line in lines}
    return Diagnosis(
        UNKNOWN,
        "The logs do not say why",
        evidence=tuple(_in_order(list(unique.values())[:_MOST_LINES])),
        notes=notes,
    )


def _notes(reports: Sequence[Report]) -> tuple[str, ...]:
    """What did no harm, and is worth knowing all the same."""
    table = signatures()
    warned = dict.fromkeys(hit.code for report in reports for hit in report.warnings)
    notes = [f"warning: {table[code].title}: {table[code].action}" for code in warned]
    outlived: dict[str, int] = {}
    for report in reports:
        for code, count in report.survived.items():
            if code in table and table[code].role in ("cause", "symptom"):
                outlived[code] = outlived.get(code, 0) + count
    notes += [
        f"seen {count} × and survived: {table[code].title}" for code, count in outlived.items()
    ]
    return tuple(notes)
