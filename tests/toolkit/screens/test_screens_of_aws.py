"""The screens of commands that need an account, with moto in place of AWS."""

from __future__ import annotations

import re

import pytest

from tests.toolkit.runs.test_run_lifecycle import FIRST, Laptop, laptop
from tests.toolkit.screens.terminal import draw, normalize
from tests.toolkit.screens.test_screens import compare
from tests.toolkit.watch.test_watch import train

__all__ = ["laptop"]

AWS_SCREENS: dict[str, list[str]] = {
    "list": ["list"],
    "status": ["status", "demo"],
    "watch": ["watch", "demo", "--once", "--dry-run"],
    "logs": ["logs", "demo"],
    "alarms": ["alarms", "demo", "--topic", "arn:aws:sns:us-east-1:345678901234:team", "--dry-run"],
    "stop": ["stop", "demo"],
    "resume-refused": ["resume", "demo"],
}
"""File → the command, in the order in which the test runs them on one job."""

_VARIABLE = (
    (r"\$\d[\d,.]*\d", "$N"),
    (r"\b\d\d:\d\d:\d\d\b", "HH:MM:SS"),
    (r"\b[\d.]+ (s|min|h|days)\b", r"N \1"),
    (r"until \d\d:\d\d( on \w+ \d+)?", "until HH:MM"),
)
"""Ages and dollars depend on when the command runs."""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_screens_of_a_job(laptop: Laptop, columns: int) -> None:
    train(laptop)
    laptop.aws.client("sns").create_topic(Name="team")
    for name, arguments in AWS_SCREENS.items():
        text = draw(
            arguments,
            columns=columns,
            cwd=laptop.folder,
            env=laptop.environment,
            network="loopback",
        )
        for pattern, replacement in _VARIABLE:
            text = re.sub(pattern, replacement, text)
        assert FIRST in text or name in ("list", "watch", "logs", "alarms"), text
        assert "Traceback" not in text
        compare(name, columns, normalize(text))
