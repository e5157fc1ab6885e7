"""Helpers of the tests of efa variables, which other tests use as well."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


EFA_VARIABLE = re.compile(r"\b(?:FI_[A-Z_]+|RDMAV_[A-Z_]+|NCCL_PROTO|NCCL_NET(?:_PLUGIN)?)\b")


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return what the table says: type → set by us, set by AWS's toolkit."""
    text = (ROOT / "docs" / "jobs.md").read_text()
    table = text.split("### Variables for EFA")[1].split("\n\n")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {
        name: (ours, set(re.findall(r"`([^`]+)`", toolkit)))
        for names, ours, toolkit in rows
        for name in names.split(", ")
    }
