"""``docs/checks.md``: a page for each finding, made from the checks themselves (``make docs``)."""

from __future__ import annotations

import sys
from importlib import import_module

from sm_train.toolkit.checks.finding import Check

_SUBJECTS = {
    "run_file": "The run file",
    "budget": "Dollars and days",
    "memory": "Memory",
    "recovery": "Interruptions",
    "fallbacks": "Fallbacks",
    "image": "The container",
    "shards": "Shards and the cluster",
    "local_data": "Shards and their index",
    "storage": "Buckets and prefixes",
    "checkpoints": "Earlier checkpoints",
    "role": "The role",
    "quotas": "Quotas",
    "permissions": "Missing permissions",
}

_HEAD = """\
# What `sm-train check` finds

Made from `toolkit/checks/` by `make docs`; mend it there. An *error* would fail a job or have it
refused, and `check` exits with 3; a *warning* costs money or may; an *info* is good to know.
"""


def checks_by_subject() -> dict[str, list[Check]]:
    """Every check by the heading of its subject, in the order of the page."""
    return {
        heading: [
            one
            for one in vars(import_module(f"sm_train.toolkit.checks.{name}")).values()
            if isinstance(one, Check)
        ]
        for name, heading in _SUBJECTS.items()
    }


def render() -> str:
    """The whole document."""
    seen: set[str] = set()
    parts = [_HEAD]
    for heading, checks in checks_by_subject().items():
        own = [check for check in checks if check.code not in seen]
        seen.update(check.code for check in own)
        parts += [f"\n## {heading}\n", *map(_page, own)]
    return "".join(parts)


def _page(check: Check) -> str:
    lines = [
        f"\n### {check.code}",
        f"*{', '.join(check.levels)}*",
        check.means,
        f"**Impact.** {check.impact}",
        f"**Fix.** {check.fix}",
    ]
    if check.source:
        lines.append(f"**Source.** {check.source}.")
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
