"""The reference of event lines and of the warnings in them, from the code that writes them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import sm_train.entrypoints
from sm_train.entrypoints.job_interface import events
from tables import code, row, table

HEAD = """\
# Event lines

A job writes one line per event to standard output, and so to CloudWatch: `SMT ` and a JSON object.
The progress
bar, `watch`, `review`, `cost --measured` and CloudWatch's metric definitions read these lines.
Times are Unix seconds, durations are `*_seconds`, unknown values are `null`.

```text
{example}
```

Every event has `kind`, `time`, `node` (from 0) and `rank` (−1 for a node's watchdog), and the
fields below. Events may have more fields.

## Kinds

"""

WARNINGS = """
## Codes of warnings and errors

The `code` of `warning` and `error` events, with the beginning of the message (`…` stands for
values) and the module that reports it.

"""


def render() -> str:
    """Return the page: kinds with their fields, then codes."""
    example = events.format_event(
        "checkpoint",
        {
            "step": 500,
            "path": "/opt/ml/checkpoints/step-00000500",
            "bytes": 13_851_688_960,
            "seconds": 41.2,
        },
        time=1_795_370_000.5,
        node=0,
        rank=0,
    )
    notes = _notes()
    kinds = (
        row(code(kind), notes.get(kind, ""), ", ".join(map(code, sorted(fields))))
        for kind, fields in events.FIELDS.items()
    )
    codes = (row(code(found), message, code(module)) for found, message, module in sorted(_codes()))
    return "".join(
        [
            HEAD.format(example=example),
            table(("kind", "meaning", "fields"), kinds),
            WARNINGS,
            table(("code", "message", "module"), codes),
        ]
    )


def _notes() -> dict[str, str]:
    """Return the comment above each kind in ``FIELDS``."""
    source = inspect.getsource(events)
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in source[source.index("FIELDS:") : source.index('"""Kind →')].splitlines():
        if match := re.match(r" {4}# (.*)", line):
            comment.append(match[1])
        elif match := re.match(r' {4}"(\w+)":', line):
            found[match[1]] = " ".join(comment)
            comment = []
    return found


def _codes() -> Iterator[tuple[str, str, str]]:
    """Yield each code with its message and module."""
    root = Path(sm_train.entrypoints.__file__).parent
    for path in sorted(root.rglob("*.py")):
        seen = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for found, message in _reported(node):
                if found not in seen:
                    seen.add(found)
                    yield found, message, path.relative_to(root).as_posix()


def _reported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield code and message of a call ``warn("code", message)`` or ``write(…, code="code")``."""
    if not isinstance(node, ast.Call):
        return
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name.lstrip("_") == "warn" and len(node.args) >= 2 and _is_code(node.args[0]):
        yield ast.literal_eval(node.args[0]), _message(node.args[1])
    for keyword in node.keywords:
        if name == "write" and keyword.arg == "code" and _is_code(keyword.value):
            yield ast.literal_eval(keyword.value), _message(node.args[1])


def _is_code(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(
        re.fullmatch(r"[a-z][a-z0-9-]+", str(node.value))
    )


def _message(node: ast.expr) -> str:
    """Return a message's text, with ``…`` for values; empty if it is computed elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return ""
