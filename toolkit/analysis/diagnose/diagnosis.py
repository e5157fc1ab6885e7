"""Determines why a job failed from the logs of all nodes, and which rank failed first.

A cause outranks an exception without a signature, which outranks a symptom. Echoes (messages of
the other processes after one has died) are never the cause. The earliest cause counts. If causes
conflict, or only echoes are left, the cause is ``unknown`` and the evidence lists the lines to
read: a wrong cause is worse than none. ``no-failure`` needs positive evidence: the end of the
training, not only the absence of lines that are known.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sm_train.entrypoints.distributed.nccl_log import TransportProblem, transport_problem
from sm_train.toolkit.analysis.diagnose.collectives import judge_timeouts
from sm_train.toolkit.analysis.diagnose.log_scanner import scan
from sm_train.toolkit.analysis.diagnose.matches import PROGRAM_ERROR, Match, ScanReport
from sm_train.toolkit.analysis.diagnose.network_names import is_network_fault, named_in
from sm_train.toolkit.analysis.diagnose.origins import FirstFailing, first_failing
from sm_train.toolkit.analysis.diagnose.signatures import (
    Confidence,
    Signature,
    is_programming_mistake,
    signatures,
)
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.records.job_logs import JobLogs, LogStream
from sm_train.toolkit.report_html.notebook import html_table

NO_FAILURE, UNKNOWN = "no-failure", "unknown"

_MAX_EVIDENCE = 10
_MAX_OTHERS = 3
"""Messages about other programs that are listed."""
_MAX_SHOWN = 3
"""Lines of evidence in a notebook."""
_CLOCK_SKEW_SECONDS = 5.0
"""Clocks of two nodes may differ by this much: events that are closer have no known order."""
_INEXACT_SKEW_SECONDS = 60.0
"""The same if a time is only that of a preceding line."""
_SURVIVED_SECONDS = 60.0
"""A step on another node this long after a match shows that the match did not end the job."""
_HANDLED_LINES = 100
"""A failure that is followed by another after this many lines did not end the program."""
_FAR_FROM_END = 2000
"""A match that is followed by this many lines and no failure did not end the process."""
_NEAR_END = 20
"""Lines at the end of a log in which its last error is looked for if the cause is unknown."""
_AT_END = "judged by the end of the log alone: no traceback or known message ended the job"
_TASK_EXITED = "slurm-task-exited"
"""The signature of `srun`'s message that a task ended with an error, usually Python's 1."""
_SLURM_ERROR = re.compile(r"\b(?:srun|slurmstepd): error: ")
_CANCELED = re.compile(r"slurmstepd: error: \*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+ \*\*\*")
_EXCEPTION = re.compile(r"(?:[\w.]+\.)?\w+(?:Error|Exception): ")


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """``cause`` is a signature's code, ``program-error``, ``unknown`` or ``no-failure``.

    ``details`` are further facts: earlier attempts, conflicting causes, warnings, errors from which
    the job recovered.
    """

    cause: str
    title: str
    confidence: Confidence | None = None
    first: FirstFailing | None = None
    retryable: bool | None = None
    action: str | None = None
    evidence: tuple[Match, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def parent(self) -> str | None:
        """``program-error`` for its kinds, such as ``shape-mismatch``; None for other causes."""
        signature = signatures().get(self.cause)
        return PROGRAM_ERROR if signature is not None and signature.role == "exception" else None

    def __repr__(self) -> str:
        confidence = f", {self.confidence} confidence" if self.confidence else ""
        return f"Diagnosis({self.cause}{confidence}: {self.title})"

    def _repr_html_(self) -> str:
        retry = {True: "may help", False: "will not help on its own", None: "unknown"}
        first = self.first
        failing = "" if first is None else f"{first.node or '?'}, rank {first.rank}"
        rows = [
            ["cause", f"{self.title} ({self.cause})"],
            ["first failure", failing],
            ["retry", retry[self.retryable]],
            ["fix", self.action or ""],
            *(["evidence", match.text] for match in self.evidence[:_MAX_SHOWN]),
        ]
        return html_table(("", ""), rows, notes=self.details)


def diagnose_logs(logs: JobLogs) -> Diagnosis:
    """Diagnose why a job ended.

    Raises:
        UserError: it has no logs yet, or they cannot be read.
    """
    if logs.status == "Completed":
        return succeeded()
    if not logs.last:
        raise UserError(f"{logs.name}: has no logs yet ({logs.status})")
    return diagnose(logs.last, logs.earlier)


def diagnose(
    streams: Iterable[LogStream], earlier: Sequence[Sequence[LogStream]] = ()
) -> Diagnosis:
    """Diagnose the logs of the last attempt, and list the causes of ``earlier`` attempts."""
    last = judge([scan(stream) for stream in streams])
    before = [judge([scan(stream) for stream in attempt]) for attempt in earlier]
    attempts = [
        f"attempt {number}: {diagnosis.title} ({diagnosis.cause})"
        for number, diagnosis in enumerate(before, 1)
    ]
    return replace(last, details=(*attempts, *last.details))


def succeeded() -> Diagnosis:
    """Return the diagnosis of a job that SageMaker reports as completed."""
    return Diagnosis(NO_FAILURE, "No failure found: the run succeeded")


def judge(reports: Sequence[ScanReport]) -> Diagnosis:
    """Combine the reports of all streams of one attempt.

    The first that applies is the diagnosis: success without a cause or an exception, two causes
    that contradict each other, the earliest cause, exception or symptom, success in a log that only
    ends well, the last error that a program printed, and else unknown.
    """
    all_matches = [match for report in reports for match in report.matches]
    matches = _by_time(match for match in all_matches if _may_be_fatal(match, reports))
    matches = _without_launcher_kills(matches)
    details = _details(reports)
    causes = _unexplained([match for match in matches if match.role == "cause"], matches)
    exceptions = [match for match in matches if match.role == "exception"]
    symptoms = _unexplained([match for match in matches if match.role == "symptom"], matches)
    symptoms = _without_consequences(symptoms, matches)
    if not causes and not exceptions and any(report.succeeded for report in reports):
        return replace(succeeded(), details=details)
    if causes:
        conflicting = _conflicting_causes(causes)
        if conflicting:
            titles = " and ".join(signatures()[code].title for code in conflicting)
            return _unknown(reports, matches, (*details, f"conflicting causes: {titles}"))
        return _from_signature(causes[0], reports, matches, details)
    if exceptions:
        return _from_match(exceptions[0], reports, matches, details)
    if symptoms:
        timeouts = judge_timeouts(symptoms, reports)
        notes = timeouts.notes if timeouts else ()
        found = _from_signature(symptoms[0], reports, matches, (*details, *notes))
        return replace(found, first=timeouts.first) if timeouts else found
    summaries = [report.first_failure for report in reports if report.first_failure]
    if not matches and not summaries and any(report.completed for report in reports):
        return replace(succeeded(), details=details)
    raised = [match for report in reports if (match := report.last_error()) is not None]
    if raised:
        found = _from_match(_by_time(raised)[0], reports, [*matches, *raised], (*details, _AT_END))
        return replace(found, confidence="low")
    torchrun = [
        f"torchrun saw rank {summary.rank} fail first, exit code {summary.exit_code}"
        for summary in summaries
    ]
    return _unknown(
        reports, matches, (*details, *(torchrun or _why_unknown(matches, reports, all_matches)))
    )


def _why_unknown(
    matches: Sequence[Match], reports: Sequence[ScanReport], all_matches: Sequence[Match]
) -> list[str]:
    """Explain why no cause is named, and what to look at."""
    if not sum(report.lines for report in reports):
        return ["the log is empty: check that the job wrote to it, and export it again"]
    later = [match for match in all_matches if match.role in ("cause", "exception")]
    if later and not matches and len(reports) > 1:
        return ["errors are left out because another node logged steps more than a minute later"]
    if matches:
        return [
            "the logs only show that another process ended: the log of the node that failed first "
            "may be missing"
        ]
    last = [report.last_step for report in reports if report.last_step]
    steps = f"; the last step logged is {last[-1]}" if last else ""
    return [
        "nothing reports the end of the training, and no line is a known failure: the job may "
        f"still run, or its last lines are missing{steps}"
    ]


# ------------------------------------------------------------------ which matches count


def _without_consequences(symptoms: list[Match], matches: Sequence[Match]) -> list[Match]:
    """Leave out symptoms which other processes' failures cause, if there are any.

    When a node fails, SageMaker terminates the others; when a collective fails, NCCL aborts the
    process.
    """
    others = {match.code for match in matches if match.role in ("symptom", "echo")}
    consequences = set()
    if "peer-gone" in others:
        consequences |= {"terminated", "aborted"}
    if others - {"aborted", "terminated", "process-group-abort"}:
        consequences.add("aborted")
    return [match for match in symptoms if match.code not in consequences]


def _without_launcher_kills(matches: list[Match]) -> list[Match]:
    """Leave out tasks that SLURM ended after another one had exited or the job was canceled."""
    exited = [
        match
        for match in matches
        if match.code == _TASK_EXITED or _CANCELED.search(match.text) is not None
    ]
    return [
        match
        for match in matches
        if _SLURM_ERROR.search(match.text) is None
        or match.code not in ("process-killed", "terminated")
        or not any(task.stream == match.stream and task.order < match.order for task in exited)
    ]


def _may_be_fatal(match: Match, reports: Sequence[ScanReport]) -> bool:
    """Return whether ``match`` may have ended the job."""
    [report] = [report for report in reports if report.stream == match.stream]
    table = signatures()
    # The process of an uncaught exception at the end of its log has ended, whatever the clocks of
    # other nodes say.
    ended = match.uncaught and report.lines - report.last_line[match.code] <= _HANDLED_LINES
    if (
        not ended
        and match.exact
        and match.time is not None
        and any(
            other.last_step_time is not None
            and match.time + _SURVIVED_SECONDS < other.last_step_time
            for other in reports
            if other.stream != match.stream
        )
    ):
        return False
    if _program_started(match, report):
        return False
    later = [
        other for other in report.matches if other.order > match.order and other.code != match.code
    ]
    if not later:
        # A fatal error is followed by other errors. Without any, one further step is enough to
        # show that training continued.
        # Lines of steps that were buffered may follow a message which itself ends the job.
        is_final = match.code in table and table[match.code].ends_job
        continued = report.steps > match.steps_before and not is_final
        return not continued and report.lines - report.last_line[match.code] <= _FAR_FROM_END
    return not _was_handled(match, later[0])


def _program_started(match: Match, report: ScanReport) -> bool:
    """Return whether the log shows a failure of the program, which ``match`` did not keep away.

    A request for capacity or a mount, for example, is repeated until it succeeds.
    """
    table = signatures()
    is_final = match.text.lstrip(' "').startswith("FailureReason")
    if is_final or match.code not in table or not table[match.code].before_start:
        return False
    return any(
        other.role in ("cause", "exception", "symptom")
        and other.order != match.order
        and other.code not in table[match.code].explains
        and not (other.code in table and table[other.code].before_start)
        for other in report.matches
    )


def _was_handled(match: Match, following: Match) -> bool:
    """Return whether the program continued after ``match`` until ``following`` happened.

    An error that ends a process is followed within a few lines by those of launcher and peers.
    """
    if match.role not in ("cause", "exception"):
        return False
    between = following.order - match.order
    if following.role not in ("cause", "exception"):
        return between > _FAR_FROM_END
    if following.code in _explained_by(match):
        return False
    only_logged = _EXCEPTION.match(match.text) and not match.uncaught and following.uncaught
    return bool(only_logged) or between > _HANDLED_LINES


def _explained_by(match: Match) -> frozenset[str]:
    table = signatures()
    return table[match.code].explains if match.code in table else frozenset()


def _by_time(matches: Iterable[Match]) -> list[Match]:
    """Sort by time; matches without a time come last, in the order of their stream."""
    return sorted(
        matches,
        key=lambda match: (match.time is None, match.time or 0.0, match.stream, match.order),
    )


def _unexplained(matches: list[Match], all_matches: list[Match]) -> list[Match]:
    """Return ``matches`` without those that another match explains."""
    table = signatures()
    codes = {match.code for match in all_matches if match.role in ("cause", "symptom")}
    explained = {code for found in codes for code in table[found].explains}
    return [match for match in matches if match.code not in explained]


def _conflicting_causes(causes: list[Match]) -> list[str]:
    """Return the codes of all causes that may have come first, [] if there is only one."""
    first = causes[0]
    conflicting = [first.code]
    for match in causes[1:]:
        if match.code in conflicting or match.stream == first.stream:
            continue
        skew = _CLOCK_SKEW_SECONDS if match.exact and first.exact else _INEXACT_SKEW_SECONDS
        if match.time is None or first.time is None or match.time - first.time <= skew:
            conflicting.append(match.code)
    return conflicting if len(conflicting) > 1 else []


# ------------------------------------------------------------------ the diagnosis


def _from_signature(
    match: Match, reports: Sequence[ScanReport], matches: list[Match], details: tuple[str, ...]
) -> Diagnosis:
    signature = signatures()[match.code]
    title = signature.title
    if signature.role == "exception":
        title = f"{title}: {match.text}"
    if is_network_fault(signature.code):
        details = (*named_in(matches), *details)
    return Diagnosis(
        cause=signature.code,
        title=title,
        confidence=_confidence(match, signature),
        first=first_failing(match, matches, reports),
        retryable=signature.retryable,
        action=signature.action,
        evidence=_evidence(match, matches),
        details=details,
    )


def _confidence(match: Match, signature: Signature) -> Confidence:
    """Return a signature's confidence, at most medium if the match is loose."""
    is_mention = match.loose and signature.role != "exception"
    return "medium" if is_mention and signature.confidence == "high" else signature.confidence


def _from_match(
    match: Match, reports: Sequence[ScanReport], matches: list[Match], details: tuple[str, ...]
) -> Diagnosis:
    if match.code != PROGRAM_ERROR:
        return _from_signature(match, reports, matches, details)
    return _from_exception(match, reports, matches, details)


def _from_exception(
    match: Match, reports: Sequence[ScanReport], matches: list[Match], details: tuple[str, ...]
) -> Diagnosis:
    # Other exceptions may also report a setting, a file or a fault of the machine.
    mistake = is_programming_mistake(match.text)
    return Diagnosis(
        cause=PROGRAM_ERROR,
        title=f"The program raised {match.text}",
        confidence="medium" if mistake else "low",
        first=first_failing(match, matches, reports),
        retryable=False,
        action="Read the traceback that ends with this line; the same input will raise it again.",
        evidence=_evidence(match, matches),
        details=details,
    )


def _evidence(match: Match, matches: list[Match]) -> tuple[Match, ...]:
    """Return ``match``, then up to three different lines of every other code, by time."""
    chosen, seen = [match], {(match.code, match.text)}
    per_code = {match.code: 1}
    for other in matches:
        if (other.code, other.text) in seen or per_code.get(other.code, 0) >= 3:
            continue
        seen.add((other.code, other.text))
        per_code[other.code] = per_code.get(other.code, 0) + 1
        chosen.append(other)
    return (match, *_by_time(chosen[1:_MAX_EVIDENCE]))


def _unknown(
    reports: Sequence[ScanReport], matches: list[Match], details: tuple[str, ...]
) -> Diagnosis:
    """Return an unknown cause, with lines that look like errors at the end of each stream."""
    lines = [match for match in matches if match.role in ("cause", "exception")]
    per_stream = max(2, _MAX_EVIDENCE // max(1, len(reports)))
    for report in reports:
        last = report.last_lines()
        errors = [line for line in last if line.role == "symptom"]
        texts: dict[str, Match] = {}
        for line in errors or last[-per_stream:]:
            texts.setdefault(line.text, line)
        lines += list(texts.values())[:per_stream]
    unique = {(line.stream, line.order): line for line in lines}
    return Diagnosis(
        UNKNOWN,
        _unknown_title(reports),
        evidence=tuple(_by_time(list(unique.values())[:_MAX_EVIDENCE])),
        details=details,
    )


def _unknown_title(reports: Sequence[ScanReport]) -> str:
    """Return a title with the last error near the end of a log, which may tell users the cause."""
    errors = [
        line
        for report in reports
        for line in report.last_lines()[-_NEAR_END:]
        if report.is_error(line)
    ]
    if not errors:
        return "The logs do not show the cause"
    latest = max(errors, key=lambda line: (line.time or 0.0, line.order))
    return f"Unknown cause; the last error is: {latest.text}"


def _details(reports: Sequence[ScanReport]) -> tuple[str, ...]:
    """Describe warnings, and failures from which the job recovered."""
    table = signatures()
    warned = dict.fromkeys(match.code for report in reports for match in report.warnings)
    details = [f"warning: {table[code].title}: {table[code].action}" for code in warned]
    details += _transport_warnings(reports)
    others = dict.fromkeys(match.text for report in reports for match in report.other_programs)
    details += [
        f"about a program other than the job's: {text}" for text in list(others)[:_MAX_OTHERS]
    ]
    recovered: dict[str, int] = {}
    for report in reports:
        for code, count in report.recovered.items():
            if code in table and table[code].role in ("cause", "symptom"):
                recovered[code] = recovered.get(code, 0) + count
    details += [
        f"seen {count} ×, but training continued: {table[code].title}"
        for code, count in recovered.items()
    ]
    return tuple(details)


def _transport_warnings(reports: Sequence[ScanReport]) -> list[str]:
    """Describe what slows down the network between nodes, by what NCCL reports of each."""
    nodes: dict[TransportProblem, list[str]] = {}
    for report in reports:
        for node, log in report.nccl.items():
            problem = transport_problem(log, has_rdma=False)
            if problem is not None:
                nodes.setdefault(problem, []).append(node or report.stream)
    return [
        f"warning: {', '.join(sorted(names))}: {problem.sentence}: {problem.fix}"
        for problem, names in nodes.items()
    ]
