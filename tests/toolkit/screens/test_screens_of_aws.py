"""The screens of commands that need an account, with moto in place of AWS."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.image_files import image_bytes
from tests.support.streaming.stack import Stack
from tests.toolkit.data_prep.streaming.stream_support import stack
from tests.toolkit.runs.run_lifecycle_support import FIRST, Laptop, laptop
from tests.toolkit.runs.watch.watch_support import train
from tests.toolkit.screens.screens_of_aws_support import AWS_SCREENS, STREAM_SCREENS
from tests.toolkit.screens.screens_support import compare
from tests.toolkit.screens.terminal import draw, normalize

__all__ = ["laptop", "stack"]


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
