"""The screens of commands that need an account, with moto in place of AWS."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.image_files import image_bytes
from tests.toolkit.runs.test_run_lifecycle import FIRST, Laptop, laptop
from tests.toolkit.screens.terminal import draw, normalize
from tests.toolkit.screens.test_screens import compare
from tests.toolkit.streaming.test_stream import Stack, stack
from tests.toolkit.watch.test_watch import train

__all__ = ["laptop", "stack"]

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

STREAM_SCREENS: dict[str, list[str]] = {
    "stream": ["stream", "photo-pack"],
    "stream-add": ["stream", "photo-pack", "--add", "s3://raw/2025/", "--dry-run"],
}
"""File → the command, on one streaming pack."""

_VARIABLE = (
    (r"\$\d[\d,.]*\d", "$N"),
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


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_screens_of_a_stream(stack: Stack, tmp_path: Path, columns: int) -> None:
    deployment = stack.deployment
    deployment.arrive("cut.jpg", image_bytes(0)[:300])
    for number in range(5):
        deployment.arrive(f"{number}.jpg", image_bytes(number))
        assert deployment.drain() == set()
        if number == 2:
            deployment.flush()
    deployment.sqs.send_message(QueueUrl=deployment.dead_letters, MessageBody="dead")
    stack.put_unannounced("2025/0.jpg", image_bytes(9))
    for name, arguments in STREAM_SCREENS.items():
        environment = deployment.aws.environment | {"SM_TRAIN_REGION": "us-east-1"}
        text = draw(arguments, columns=columns, cwd=tmp_path, env=environment, network="loopback")
        assert "Traceback" not in text
        compare(name, columns, normalize(text))
