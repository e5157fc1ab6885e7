"""Loads and compiles the failure signatures: ``signatures.toml`` and ``program_errors.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

SignatureRole = Literal["cause", "exception", "symptom", "echo", "warning"]
Confidence = Literal["high", "medium", "low"]

_TABLES = ("signatures.toml", "program_errors.toml")
_STRENGTH: dict[SignatureRole, int] = {
    "cause": 4,
    "symptom": 3,
    "echo": 2,
    "exception": 1,
    "warning": 0,
}
"""Which role counts if several signatures match one line: kinds of program errors come last."""
# "Triton Error [CUDA]: invalid argument"; for HIP a code comes first, and "Message" has three s
_TRITON = re.compile(r"Triton Error \[(?:CUDA|HIP)\]: (?: ?Code: \d+, Mess+age: )?")
# "omegaconf.errors.UnsupportedInterpolationType: …"
_QUALIFIED_TYPE = re.compile(r"^([a-z_]\w*(?:\.\w+)*)\.[A-Z]\w*(?:: |$)")
_EXCEPTION_TYPE = (
    r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)|Exception|Error)(?:\(\w+\))?: .*?"
)


@dataclass(frozen=True)
class Signature:
    """One failure and how to recognize it; the head of the table describes each field."""

    code: str
    title: str
    role: SignatureRole
    confidence: Confidence
    retryable: bool
    action: str
    source: str
    regex: re.Pattern[str] | None
    exception: re.Pattern[str] | None
    in_library: re.Pattern[str] | None
    libraries: tuple[str, ...]
    at_end: re.Pattern[str] | None
    resolved: re.Pattern[str] | None
    ends_job: bool
    before_start: bool
    explains: frozenset[str]
    examples: tuple[str, ...]


@cache
def signatures() -> dict[str, Signature]:
    """Return all signatures by code, in the order of the table."""
    tables = [Path(__file__).with_name(name) for name in _TABLES]
    return {row["code"]: _signature(row) for table in tables for row in _rows(table)}


def _rows(table: Path) -> list[dict[str, Any]]:
    with table.open("rb") as file:
        rows: list[dict[str, Any]] = tomllib.load(file)["signature"]
    return rows


def _signature(row: dict[str, Any]) -> Signature:
    pattern = _pattern(row) if "regex" in row else None
    is_kind = row["role"] == "exception"
    return Signature(
        **{key: row[key] for key in ("code", "title", "role", "confidence", "retryable")},
        action=row["action"],
        source=row["source"],
        regex=_compiled(f"{_EXCEPTION_TYPE}(?:{pattern})" if pattern and is_kind else pattern),
        exception=_compiled(row.get("exception")),
        in_library=_compiled(row.get("in_library")),
        libraries=tuple(row.get("libraries", ())),
        at_end=_compiled(row.get("at_end")),
        resolved=_compiled(row.get("resolved")),
        ends_job=row.get("ends_job", False),
        before_start=row.get("before_start", False),
        explains=frozenset(row.get("explains", ())),
        examples=tuple(row["examples"]),
    )


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    return None if pattern is None else re.compile(pattern)


def _pattern(row: dict[str, Any]) -> str:
    """Return a signature's regular expression, with the messages about its signals."""
    return "|".join([row["regex"], *(_signal_pattern(signal) for signal in row.get("signals", ()))])


def _signal_pattern(signal: str) -> str:
    """Return a pattern of messages that a signal, as "9 SIGKILL Killed", ended a process.

    Messages about a signal that a launcher sends to the other processes do not match. The sources
    are bash, zsh, glibc, PyTorch (torchrun, DataLoader, spawn), DeepSpeed, Composer, Paddle, Open
    MPI, MPICH, SLURM, Docker, Kubernetes and systemd.
    """
    number, name, text = signal.split(" ", 2)
    ended = rf"(?:-{number}|{128 + int(number)})\b(?!\.\d)"
    lower_text = f"[{text[0]}{text[0].lower()}]{text[1:]}"
    return "|".join(
        (
            # "exit code: 137", "Exit Code:    137", "exited with code -9", "return code = -9",
            # "returncode 137", "exit status 137", "ExitCode 137", "crashed with exit code -9."
            rf"(?:{_CODE})\W{{0,9}}?(?<![\d.]){ended}",
            # "failed (exitcode: -9) local_rank: 3", "status failed cmd […] code -6 log"
            rf"\bcode:? -{number}\b",
            # "exited on signal 9", "killed by signal 9", "Caught signal 11 (…)", "got signal: 9"
            rf"(?:exited on|by|[Cc]aught|got|on|received) [Ss]ignal:? {number}\b",
            # PRRTE breaks the line after "exited on": "signal 11 (Segmentation fault)."
            rf"^signal {number}(?: \([^)]*\))?\.$",
            # "died with <Signals.SIGKILL: 9>", "Signal 9 (SIGKILL) received", "*** SIGSEGV (@0x0)"
            rf"^(?!.*{_SENDING}).*\b{name}\b",
            # "status=9/KILL"
            rf"\bstatus={number}/{name[3:]}\b",
            # "Killed", "Segmentation fault (core dumped)", "Fatal Python error: Bus error"
            rf"^(?:Fatal Python error: )?{text}(?: +\(core dumped\))?$",
            rf"^Fatal Python error: {text}\b",
            rf"{lower_text} +\(core dumped\)",
            # "start.sh: line 12: 4242 Killed   python …", zsh: "[1]  + 4242 killed  python …"
            rf": line \d+: +\d+ {text}\b|^\[\d+\] +[+-]? *\d+ {lower_text}\b",
            rf"killed by signal: {text}\b",
            rf"srun: error: \S+: tasks? [\d,-]+: {text}\b",
            rf"Signal: {text} \({number}\)",
        )
    )


_CODE = "|".join(
    (
        *("exit code", "Exit code", "Exit Code", "EXIT CODE", "exitcode", "exitCode", "ExitCode"),
        *("exit status", "Exit status", "exit_code", "exited with", "exited with code"),
        *("return code", "returncode", "status code", "terminated with code", "failed with code"),
    )
)
_SENDING = (
    r"(?:[Ss]end|[Cc]losing|[Kk]illing|[Ff]orc|will be|[Hh]andler|\btrap|[Ii]gnor|[Ss]topping"
    # A list of possible causes is no evidence of one.
    r"|[Pp]otential|[Pp]ossibl|\bmight\b|\bmay have\b|by OOM killer due to)"
)


def _loosened(pattern: str) -> bytes:
    """Return a pattern for RE2 that matches wherever ``pattern`` does, also after a line's prefix.

    It has no anchors, no lookarounds, which RE2 lacks, and no counted repetitions: each of those
    multiplies the states of an automaton.
    """
    unanchored = _DROPPED.sub(lambda found: found["kept"] or "", pattern)
    return _COUNTED.sub(lambda found: "*" if found["least"] == "0" else "+", unanchored).encode()


_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
_ITEM = rf"(?:\\.|{_CLASS}|[^()\[\\])"
_GROUP = rf"\((?:{_ITEM}|\((?:{_ITEM}|\({_ITEM}*\))*\))*\)"
_DROPPED = re.compile(rf"(?P<kept>\\.|{_CLASS})|[\^$]|\(\?<?[=!](?:{_ITEM}|{_GROUP})*\)")
"""An escaped character or a class of characters, which is kept, or an anchor or a lookaround."""
_COUNTED = re.compile(r"(?<!\\)\{(?P<least>\d+)(?:,\d*)?\}")


def searched_patterns() -> tuple[bytes, ...]:
    """Return RE2's patterns of the lines that matter to any signature."""
    patterns = [
        pattern
        for signature in signatures().values()
        for pattern in (signature.regex, signature.resolved)
    ]
    return tuple(_loosened(pattern.pattern) for pattern in patterns if pattern is not None)


@cache
def _signature_filter() -> tuple[Any, list[Signature]]:
    """Return a filter that finds all strings which the patterns require in one pass (re2.Filter).

    It returns the indices of the patterns that may match, for the list of their signatures.
    """
    import re2

    with_regex = [signature for signature in signatures().values() if signature.regex is not None]
    candidates = re2.Filter()
    for signature in with_regex:
        assert signature.regex is not None
        candidates.Add(_loosened(signature.regex.pattern))
    candidates.Compile()
    return candidates, with_regex


def matching(text: str) -> list[Signature]:
    """Return the signatures of the strongest role that match ``text``, a line without prefix."""
    candidates, with_regex = _signature_filter()
    possible = [with_regex[index] for index in sorted(candidates.Match(text, True) or ())]
    return _strongest([signature for signature in possible if _found(signature, text)])


def _found(signature: Signature, text: str) -> bool:
    return signature.regex is not None and signature.regex.search(text) is not None


def matching_exception(text: str, library: str | None = None) -> list[Signature]:
    """Return the signatures of the last line of a traceback, such as ``OSError: …``.

    ``library`` is the module of an installed library that raised it, such as
    ``torch/nn/functional``.
    """
    # Triton and PyTorch print the same texts of the CUDA driver.
    text = _TRITON.sub("CUDA error: ", text)
    mistake = is_programming_mistake(text)
    table = signatures().values()
    modules = [signature for signature in (library, _module_of_type(text)) if signature]
    raised = [
        signature
        for signature in table
        if any(_is_raised(signature, text, module) for module in modules)
    ]
    found = matching(text)
    # A broken connection of a tracker or a client is not one between ranks, and the device without
    # space that a semaphore is on is no disk.
    if found and not (raised and (found[0].role == "echo" or found[0].code in raised[0].explains)):
        return found
    causes = [
        signature
        for signature in table
        if signature.role != "exception" and _looks_like(signature, text, library)
    ]
    if causes and not mistake:
        return _strongest(causes)
    kinds = [
        signature
        for signature in table
        if signature.role == "exception" and _looks_like(signature, text, library)
    ]
    # A message such as "No such file or directory" says more than the library that raised it.
    if raised and not mistake and not (kinds and raised[0].role == "exception"):
        return raised[:1]
    return kinds[:1]


def _module_of_type(text: str) -> str | None:
    """Return the module that defines an exception, as ``omegaconf/errors``; None for built-ins."""
    named = _QUALIFIED_TYPE.match(text)
    return named[1].replace(".", "/") if named else None


def _is_raised(signature: Signature, text: str, library: str) -> bool:
    """Return whether an exception of ``library`` is this failure whatever else it says."""
    is_about = signature.in_library is None or signature.in_library.search(text)
    return library.startswith(signature.libraries) and bool(is_about)


def _looks_like(signature: Signature, text: str, library: str | None) -> bool:
    in_any_library = signature.in_library if library and not signature.libraries else None
    patterns = (signature.exception, in_any_library)
    return any(pattern is not None and pattern.search(text) for pattern in patterns)


def is_resolved(code: str, text: str) -> bool:
    """Return whether the failure ``code`` is over according to a later line."""
    signature = signatures().get(code)
    resolved = signature.resolved if signature is not None else None
    return resolved is not None and resolved.search(text) is not None


def matching_at_end(text: str) -> Signature | None:
    """Return the signature of a message that a log ends with, by the program that wrote it."""
    table = signatures().values()
    return next(
        (signature for signature in table if signature.at_end and signature.at_end.search(text)),
        None,
    )


def is_programming_mistake(text: str) -> bool:
    """Return whether an exception has a type that a mistake in a program raises."""
    return _PROGRAMMING_MISTAKES.match(text) is not None


def _strongest(matched: list[Signature]) -> list[Signature]:
    """Return the signatures of the strongest role; only the first kind of a program error."""
    strongest = max((_STRENGTH[signature.role] for signature in matched), default=0)
    found = [signature for signature in matched if _STRENGTH[signature.role] == strongest]
    return found[:1] if found and found[0].role == "exception" else found


_PROGRAMMING_MISTAKES = re.compile(
    r"(?:Type|Key|Index|Attribute|Name|UnboundLocal|ZeroDivision|NotImplemented|Recursion)Error\b"
    r"|AssertionError:?$"
)
