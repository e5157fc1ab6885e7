"""Generates ``docs/checks.md``, a page per finding, from the checks themselves (``make docs``)."""

from __future__ import annotations

import sys
from importlib import import_module

from sm_train.toolkit.checks.finding import Check

_SUBJECTS = {
    "run_file": "The run file",
    "entry": "A training script of your own",
    "budget": "Cost and duration",
    "memory": "Memory",
    "user_functions": "Functions of your code",
    "recovery": "Interruptions",
    "relocation": "Relocation",
    "image": "The container image",
    "network": "The network",
    "components": "Pretrained components",
    "shards": "Shards and the cluster",
    "local_data": "Shards and their index",
    "storage": "Buckets and prefixes",
    "checkpoints": "Earlier checkpoints",
    "role": "The IAM role",
    "quotas": "Quotas",
    "permissions": "Missing permissions",
}

_HEAD = """\
# What `sm-train check` finds

Generated from `toolkit/checks/` by `make docs`; edit it there. An *error* would make a job fail or
be rejected, and `check` exits with 3; a *warning* costs money or may do so; an *info* is for your
information.
"""


def checks_by_subject() -> dict[str, list[Check]]:
    """Return all checks, grouped by the heading of their subject in page order."""
    return {
        heading: [
            value
            for value in vars(import_module(f"sm_train.toolkit.checks.{name}")).values()
            if isinstance(value, Check)
        ]
        for name, heading in _SUBJECTS.items()
    }


def render() -> str:
    """Render the whole document as Markdown."""
    seen: set[str] = set()
    parts = [_HEAD]
    for heading, checks in checks_by_subject().items():
        # A module also sees the checks that it imports from another subject.
        unseen = [check for check in checks if check.code not in seen]
        seen.update(check.code for check in unseen)
        parts += [f"\n## {heading}\n", *map(_page, unseen)]
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
