"""Prints the log of a run's job."""

from __future__ import annotations

import json
import sys

from sm_train.entrypoints.job_interface.events import PREFIX
from sm_train.toolkit.platforms.placed_run import JobLogLine
from sm_train.toolkit.terminal.formatting import printable


def print_line(line: JobLogLine, *, raw: bool, as_json: bool, with_node: bool) -> None:
    """Print a line. Event lines repeat a readable line, so they are skipped unless ``raw``."""
    text = line.message.rstrip("\n")
    if PREFIX + "{" in text and not raw:
        return
    shown = printable(f"{line.node} | {text}" if with_node else text)
    if as_json:
        shown = json.dumps({"time": line.time, "node": line.node, "message": text})
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()
