"""Runs a program whose calls are recorded (``sitecustomize.py``), to its end or to one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.deadline import DEADLINE

RECORDER = Path(__file__).parent
CLI = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"


@dataclass(frozen=True)
class Call:
    """A call in the order of a trace.

    ``kind`` is flush, name, remove, or the method of a request. ``path`` is the file, the new name,
    or the bucket and key. A name has the file's earlier ``source``; ``state`` changes with the
    file's content, and is None for a folder.
    """

    kind: str
    path: str
    source: str | None = None
    state: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.path.partition("?")[0].rpartition("/")[2]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]


@dataclass(frozen=True)
class Program:
    """A Python program with its arguments, which runs in ``folder``."""

    folder: Path
    environment: Mapping[str, str]
    arguments: Sequence[str]
    code: str = CLI

    def run(
        self, trace: Path, kill_at: int = 0, fail_at: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run it until its end, or until its call of this number, which kills it or fails."""
        trace.unlink(missing_ok=True)
        path = self.environment.get("PYTHONPATH", "")
        added = {
            "ORDER_TRACE": str(trace),
            "ORDER_KILL_AT": str(kill_at),
            "ORDER_FAIL_AT": str(fail_at),
            "PYTHONPATH": f"{RECORDER}:{path}".rstrip(":"),
        }
        return subprocess.run(
            [sys.executable, "-c", self.code, *self.arguments],
            cwd=self.folder,
            env={**self.environment, **added},
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            start_new_session=True,
            check=False,
        )


def read_trace(trace: Path) -> list[Call]:
    """Return the calls of a trace that were made."""
    return [_call(*json.loads(line)) for line in trace.read_text().splitlines()]


def _call(kind: str, path: str, *more: Any) -> Call:
    if kind == "flush":
        return Call(kind, path, state=more[0] and tuple(more[0]))
    if kind == "name":
        return Call(kind, path, more[0], more[1] and tuple(more[1]))
    return Call(kind, path)


def not_durable(calls: Sequence[Call]) -> Iterator[str]:
    """Yield each broken rule: content is flushed before its name, and the name before a removal.

    Names are flushed with their folder; those of temporary files do not count, nor do files that a
    crash may take without a loss: leases, and the trace of a program's own folder.
    """
    flushed: dict[str, tuple[int, ...] | None] = {}
    open_names: dict[str, set[str]] = {}
    for call in calls:
        if call.kind == "flush":
            flushed[call.path] = call.state
            open_names.pop(call.path, None)
        elif call.kind == "name":
            if flushed.get(str(call.source), ()) != call.state:
                yield f"{call.path}: named before its content was flushed"
            open_names.setdefault(call.folder, set()).add(call.name)
        elif call.kind == "remove" and not call.name.startswith("."):
            for folder, names in open_names.items():
                yield f"{call.path}: removed before {folder} was flushed with {min(names)}"
    for folder, names in open_names.items():
        yield f"{folder}: never flushed after {min(names)} got its name"
