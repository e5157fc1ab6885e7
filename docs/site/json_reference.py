"""The reference of ``--json``: from typed documents, and from commands that run offline."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sm_train.toolkit.analysis.diagnose.diagnosis_view import DiagnosisDocument
from sm_train.toolkit.analysis.review.review_model import Review
from sm_train.toolkit.checks.check_report import CheckDocument
from sm_train.toolkit.data_prep.packing.on_sagemaker import ProcessingPackDocument
from sm_train.toolkit.data_prep.packing.pack_report import IndexDocument, PackDocument
from sm_train.toolkit.probes.doctor.canary_report import CanaryDocument
from sm_train.toolkit.runs.listing import ListedRun
from sm_train.toolkit.runs.run_status import Status
from sm_train.toolkit.runs.watch.output import WatchStatus
from sm_train.toolkit.terminal.json_record import record_keys
from tables import code, row, table

DOCUMENTS: dict[str, Any] = {
    "pack --json": PackDocument,
    "pack --on sagemaker --dry-run --json": ProcessingPackDocument,
    "index --json": IndexDocument,
    "check --json": CheckDocument,
    "list --json (each of runs)": ListedRun,
    "status --json": Status,
    "watch --json (each line)": WatchStatus,
    "review --json": Review,
    "diagnose --json": DiagnosisDocument,
    "doctor --canary --json": CanaryDocument,
}
"""Command → the type of its document."""

_LISTS = (list, tuple, Sequence)

RUN = {
    "cost --json": ("cost", "run.yaml", "--json"),
    "image --json": ("image", "run.yaml", "--json"),
}
"""Command → arguments with which it prints its document offline."""

HEAD = """\
# JSON outputs

`--json` prints one document, and nothing else, on standard output; messages go to standard error,
and exit codes
stay the same. Unknown values are `null`, dollars are numbers ending in `_usd`, durations are
`*_seconds`, and shares are of 1. New keys may be added to a document.

```
sm-train check run.yaml --offline --json
```

[watch --json](../watch.md) describes the keys of that document one by one. `submit --dry-run
--json` prints the training requests, with the keys of SageMaker's `CreateTrainingJob`.
"""


def render() -> str:
    """Return the page: a table of keys and types for each command."""
    parts = [HEAD]
    for command, document in DOCUMENTS.items():
        rows = (row(code(key), kind) for key, kind in _keys(document, ""))
        parts += [f"\n## {command}\n\n", table(("key", "type"), rows)]
    for command, document in _printed().items():
        rows = (row(code(key), code(value)) for key, value in _examples(document, ""))
        parts.append(f"\n## {command}\n\nKeys and values for the preset `bria-2.0`:\n\n")
        parts.append(table(("key", "example"), rows))
    return "".join(parts)


def _keys(document: Any, prefix: str) -> Iterator[tuple[str, str]]:
    for key, kind in record_keys(document):
        inner, suffix = _inner(kind)
        yield prefix + key, _name(kind)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{key}{suffix}.")


def _is_record(kind: Any) -> bool:
    """Return whether a type has keys of its own in JSON."""
    return typing.is_typeddict(kind) or dataclasses.is_dataclass(kind)


def _inner(kind: Any) -> tuple[Any, str]:
    """Return the document inside a type, and ``[]`` for each list around it."""
    if _is_record(kind):
        return kind, ""
    for argument in typing.get_args(kind):
        found, suffix = _inner(argument)
        if found is not None:
            return found, ("[]" if typing.get_origin(kind) in _LISTS else "") + suffix
    return None, ""


def _name(kind: Any) -> str:
    """Return a type in words of JSON."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if _is_record(kind):
        return "object"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_name, arguments)))
    if origin is typing.Literal:
        return ", ".join(code(json.dumps(argument)) for argument in arguments)
    if origin in _LISTS:
        return f"list of {_name(arguments[0])}"
    if origin in (dict, Mapping):
        return f"map of {_name(arguments[1])}"
    names = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
    return names.get(kind, "any")


def _printed() -> dict[str, Any]:
    """Run the commands of :data:`RUN` in an empty folder; return their documents."""
    program = [sys.executable, "-m", "sm_train.toolkit"]
    documents = {}
    with tempfile.TemporaryDirectory() as folder:
        initialize = [*program, "init", "run.yaml", "--preset", "bria-2.0"]
        subprocess.run(initialize, cwd=folder, check=True, capture_output=True)
        for command, arguments in RUN.items():
            done = subprocess.run(
                [*program, *arguments], cwd=Path(folder), check=True, capture_output=True
            )
            documents[command] = json.loads(done.stdout)
    return documents


def _examples(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each key below ``value`` with its value; lists are represented by their first item."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _examples(inner, f"{prefix}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        yield from _examples(value[0], f"{prefix}[]")
    else:
        yield prefix, json.dumps(value, ensure_ascii=False)
