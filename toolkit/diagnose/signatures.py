"""Loads and compiles the table of failure signatures, ``signatures.toml``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sm_train.toolkit.diagnose.required_literals import required_literals

SignatureRole = Literal["cause", "symptom", "echo", "warning"]
Confidence = Literal["high", "medium", "low"]

AUTOMATON_BYTES = 64 << 20
"""The most memory of RE2 for one automaton; 8 MiB by default, too little for all literals."""

_TABLE = Path(__file__).with_name("signatures.toml")
_STRENGTH: dict[SignatureRole, int] = {"cause": 3, "symptom": 2, "echo": 1, "warning": 0}


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
    literals: frozenset[str]
    regex: re.Pattern[str]
    exception: re.Pattern[str] | None
    ends_job: bool
    explains: frozenset[str]
    examples: tuple[str, ...]


@cache
def signatures() -> dict[str, Signature]:
    """Return all signatures by code, in the order of the table."""
    with _TABLE.open("rb") as file:
        rows = tomllib.load(file)["signature"]
    parsed = (
        Signature(
            **{key: row[key] for key in ("code", "title", "role", "confidence", "retryable")},
            action=row["action"],
            source=row["source"],
            literals=required_literals(pattern),
            regex=re.compile(pattern),
            exception=re.compile(row["exception"]) if "exception" in row else None,
            ends_job=row.get("ends_job", False),
            explains=frozenset(row.get("explains", ())),
            examples=tuple(row["examples"]),
        )
        for row, pattern in ((row, _pattern(row)) for row in rows)
    )
    return {one.code: one for one in parsed}


def _pattern(row: dict[str, Any]) -> str:
    """Return a signature's regular expression, with the messages about its signals."""
    return "|".join([row["regex"], *(_signal_pattern(one) for one in row.get("signals", ()))])


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
    r"(?:[Ss]end|[Cc]losing|[Kk]illing|[Ff]orc|will be|[Hh]andler|\btrap|[Ii]gnor|[Ss]topping)"
)


@cache
def literals() -> tuple[str, ...]:
    """Return the literals of all signatures: a line without any of them matches no signature."""
    return tuple(dict.fromkeys(text for one in signatures().values() for text in one.literals))


@cache
def _literal_set() -> tuple[Any, list[list[int]]]:
    """Compile all literals to one set, with the table indices of each literal's signatures."""
    import re2

    options = re2.Options()
    options.max_mem = AUTOMATON_BYTES
    literal_set, indices = re2.Set.SearchSet(options), []
    for literal in literals():
        literal_set.Add(re2.escape(literal))
        indices.append(
            [index for index, one in enumerate(signatures().values()) if literal in one.literals]
        )
    literal_set.Compile()
    return literal_set, indices


def matching(text: str) -> list[Signature]:
    """Return the signatures of the strongest role that match ``text``, a line without prefix."""
    literal_set, indices = _literal_set()
    # One RE2 pass finds all literals in the line; only their signatures' regexes are tried.
    candidates = sorted(
        {index for literal in literal_set.Match(text) or () for index in indices[literal]}
    )
    table = list(signatures().values())
    return _strongest([table[index] for index in candidates if table[index].regex.search(text)])


def matching_exception(text: str) -> list[Signature]:
    """Return the signatures of the last line of a traceback, such as ``OSError: …``."""
    if (found := matching(text)) or _PROGRAMMING_MISTAKES.match(text):
        return found
    table = signatures().values()
    return _strongest([one for one in table if one.exception and one.exception.search(text)])


def _strongest(matched: list[Signature]) -> list[Signature]:
    strongest = max((_STRENGTH[one.role] for one in matched), default=0)
    return [one for one in matched if _STRENGTH[one.role] == strongest]


_PROGRAMMING_MISTAKES = re.compile(
    r"(?:Type|Key|Index|Attribute|Name|UnboundLocal|ZeroDivision|NotImplemented|Recursion)Error\b"
)
