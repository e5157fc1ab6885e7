"""The output of ``watch``: for a terminal, for a script, and live on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from tests.conftest import clean_environment
from tests.support.deadline import DEADLINE
from tests.support.job_lifecycle import LOG_GROUP
from tests.toolkit.runs.run_lifecycle_support import FIRST, SECOND, Laptop
from tests.toolkit.runs.watch import watch_support
from tests.toolkit.runs.watch.watch_support import STEP, train

laptop = watch_support.laptop

ON_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# The parent may ignore SIGINT, which a child inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)
from sm_train.toolkit.cli import main
main(sys.argv[1:])
"""
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|.)")


# ------------------------------------------------------------------ a single poll


@pytest.mark.slow
def test_once_prints_the_view_or_a_document(laptop: Laptop) -> None:
    train(laptop)
    view = laptop("watch", "demo", "--once").stderr
    assert max(map(len, view.splitlines())) <= 100
    assert "demo  256px  training" in view
    assert "590 of 1,000" in view
    for text in (
        "it/s      1.8",
        "loss      0.0333",
        "data wait 2.0 %",
        "MFU 41.0 %",
        "step 400, 7 min ago",
        "budget $500",
        "98 %",
        "61 GiB",
        "algo-4: rank 24 is busy for 0.7 s of each step, 1.40 × the others",
        "algo-2 bad-sample: 3 samples were skipped",
    ):
        assert text in view, text
    assert re.search(r"algo-4 +1[12] min", view)
    assert re.search("[▁▂▃▄▅▆▇█]{10}", view)
    document = laptop.json("watch", "demo", "--once")
    assert [node["node"] for node in document["nodes"]] == ["algo-1", "algo-2", "algo-3", "algo-4"]
    assert document["nodes"][3]["heartbeat_age_seconds"] == pytest.approx(700, abs=60)
    assert document["nodes"][0]["gpu_utilization"] == 98.0
    assert [(straggler["rank"], straggler["node"]) for straggler in document["stragglers"]] == [
        (24, "algo-4")
    ]
    assert document["recent_warnings"][0]["code"] == "bad-sample"
    assert (document["budget_usd"], document["mfu"], document["action"]) == (500, 0.41, "wait")
    assert document["seconds_since_checkpoint"] == pytest.approx(400, abs=60)


@pytest.mark.integration
def test_unlogged_gpu_utilization_comes_from_cloudwatch(laptop: Laptop) -> None:
    """CloudWatch sums the 8 GPUs of an instance; denied metrics do not end the watch."""
    laptop.sagemaker.log_event(FIRST, "step", step=40)
    laptop.aws.client("cloudwatch").put_metric_data(
        Namespace=LOG_GROUP,
        MetricData=[
            {
                "MetricName": "GPUUtilization",
                "Value": 720.0,
                "Timestamp": time.time() - 120,
                "Dimensions": [{"Name": "Host", "Value": f"{FIRST}/algo-2"}],
            }
        ],
    )
    nodes = laptop.json("watch", "demo", "--once")["nodes"]
    assert [node["gpu_utilization"] for node in nodes] == [None, 90.0, None, None]
    laptop.aws.error_codes["GetMetricData"] = "AccessDeniedException"
    assert laptop.json("watch", "demo", "--once")["nodes"][1]["gpu_utilization"] is None


def test_stall_exits_with_8_and_shows_its_reason(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "InProgress", "Training", seconds=4200)
    laptop.sagemaker.log_event(FIRST, "step", ago=4100, step=190, loss=0.5)
    laptop.sagemaker.log_event(FIRST, "step", ago=4000, step=200, loss=None)
    laptop.sagemaker.log_event(
        FIRST, "warning", ago=3000, code="stall", message="no progress for 900 s in step"
    )
    laptop.sagemaker.log_event(FIRST, "heartbeat", ago=2500, step=200, seconds_since_step=1500.0)
    view = laptop("watch", "demo", "--once", "--dry-run", code=8).stderr
    assert "demo  256px  stalled" in view
    assert "stall: no progress for 900 s in step" in view
    assert "loss      NaN" in view
    assert "has made no progress since step 200" in view


# ------------------------------------------------------------------ a terminal


@dataclass
class Terminal:
    """The command on a pseudo-terminal; ``raw`` is all of its output."""

    process: subprocess.Popen[bytes]
    handle: int
    raw: bytes = b""
    position: int = field(default=0)

    def wait_for(self, expected: str, seconds: float = DEADLINE) -> str:
        """Read until ``expected`` appears after the previously expected text."""
        deadline = time.monotonic() + seconds
        while expected not in self.text[self.position :]:
            assert time.monotonic() < deadline, self.text[-3000:]
            assert self._read(), self.text[-3000:]
        self.position = self.text.rindex(expected) + len(expected)
        return self.text

    @property
    def text(self) -> str:
        return _ESCAPE.sub("", self.raw.decode(errors="replace"))

    def _read(self) -> bool:
        ready, _, _ = select.select([self.handle], [], [], 1)
        if not ready:
            return self.process.poll() is None
        try:
            self.raw += os.read(self.handle, 2**16)
        except OSError:  # the process has closed its end
            return False
        return True

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self.handle, b"\x03")

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait(DEADLINE)


@contextmanager
def terminal(laptop: Laptop, *arguments: str, **environment: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    env = clean_environment(laptop.folder) | laptop.environment | {"TERM": "xterm-256color"}
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, "watch", "demo", *arguments],
        env=env | environment,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def behind_an_empty_page(laptop: Laptop, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Respond with an empty first page, then with moto's only page."""
    if body.get("limit") == 9999:
        return None
    if "nextToken" not in body:
        return 200, {"events": [], "nextToken": "more"}
    request = {key: value for key, value in body.items() if key not in ("nextToken", "_region")}
    events = laptop.aws.client("logs").filter_log_events(**request, limit=9999)["events"]
    return 200, {"events": events}


@pytest.mark.slow
@pytest.mark.integration
def test_live_view_follows_the_log_and_ctrl_c_ends_only_the_watch(laptop: Laptop) -> None:
    """Between two polls: new steps, a new node's stream, empty pages and a throttled call."""
    train(laptop, steps=5)
    laptop.aws.responses["FilterLogEvents"] = partial(behind_an_empty_page, laptop)
    with terminal(laptop, "--interval", "300s", "--dry-run", NO_COLOR="1") as screen:
        screen.wait_for("next poll in")
        laptop.sagemaker.log_event(FIRST, "step", ago=0, step=777, **STEP)
        screen.wait_for("777 of 1,000")
        laptop.aws.error_codes["FilterLogEvents"] = "ThrottlingException"
        screen.wait_for("AWS returned ThrottlingException")
        del laptop.aws.error_codes["FilterLogEvents"]
        laptop.sagemaker.log_event(
            FIRST, "heartbeat", ago=0, node=11, step=778, seconds_since_step=0.1
        )
        laptop.sagemaker.log_event(
            FIRST, "warning", ago=0, node=11, code="checkpoint-failed", message="full"
        )
        screen.wait_for("algo-12 checkpoint-failed: full")
        screen.interrupt()
        assert screen.end() == 130
    last = " ".join(screen.text.split())
    assert "the run itself continues: `sm-train watch demo` follows it again" in last
    assert "Traceback" not in screen.text
    assert screen.raw.rstrip().endswith(b"again")
    # The cursor is visible again, and the alternate screen was not used.
    assert screen.raw.rindex(b"\x1b[?25h") > screen.raw.rindex(b"\x1b[?25l")
    assert b"\x1b[?1049h" not in screen.raw
    assert b"\x1b[32m" not in screen.raw
    assert len(laptop.aws.bodies("ListTrainingJobs")) < 8


@pytest.mark.slow
def test_actions_are_printed_above_the_live_view(laptop: Laptop) -> None:
    laptop.sagemaker.set_status(FIRST, "Failed", reason="InternalServerError: x", ended_ago=3600)
    with terminal(laptop, "--interval", "1s") as screen:
        screen.wait_for(f"started {SECOND} from step 0")
        screen.wait_for("starting")
        laptop.sagemaker.set_status(SECOND, "Completed")
        laptop.sagemaker.checkpoint("256px", 1000)
        assert screen.end() == 0
    assert "the run is done" in screen.text


@pytest.mark.slow
def test_expired_credentials_end_the_watch_with_the_fix(laptop: Laptop) -> None:
    train(laptop, steps=5)
    with terminal(laptop, "--interval", "1s") as screen:
        screen.wait_for("next poll")
        laptop.aws.error_codes["ListTrainingJobs"] = "ExpiredTokenException"
        assert screen.end() == 4
    text = " ".join(screen.text.split())
    assert "the run itself continues, with its checkpoints, alerts and SageMaker's own " in text
    assert (
        "nothing will start another job after a failure, start the next stage or stop the run at "
        "its budget: fix this and watch again"
    ) in text


@pytest.mark.integration
def test_without_a_terminal_each_poll_prints_a_line(laptop: Laptop) -> None:
    """Failed polls as well."""
    train(laptop, steps=5)
    polls: list[int] = []

    def throttle_twice(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        polls.append(1)
        if len(polls) == 3:
            laptop.sagemaker.set_status(FIRST, "Completed")
            laptop.sagemaker.checkpoint("256px", 1000)
        if len(polls) in (2, 3):
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        return None

    laptop.aws.responses["ListTrainingJobs"] = throttle_twice
    laptop.environment["AWS_MAX_ATTEMPTS"] = "1"
    lines = laptop("watch", "demo", "--interval", "1s").stderr
    assert "\x1b" not in lines
    assert "AWS returned ThrottlingException" in lines
    assert "retrying in 2 s" in lines
    assert "the run is done" in lines


# ------------------------------------------------------------------ following


@pytest.mark.integration
def test_followed_log_survives_errors_and_empty_pages(laptop: Laptop) -> None:
    """`logs --follow` reports the failed page and reads it again."""
    logs = laptop.aws.client("logs")
    logs.create_log_group(logGroupName=LOG_GROUP)
    logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=f"{FIRST}/algo-1-1")
    now = int(time.time() * 1000)
    logs.put_log_events(
        logGroupName=LOG_GROUP,
        logStreamName=f"{FIRST}/algo-1-1",
        logEvents=[{"timestamp": now - 1000, "message": "a line"}],
    )
    calls: list[dict[str, Any]] = []

    def respond(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        calls.append(body)
        if len(calls) == 1:
            return 200, {"events": [], "nextToken": "more"}
        if len(calls) == 2:
            assert body["nextToken"] == "more"
            laptop.sagemaker.set_status(FIRST, "Completed")
            laptop.sagemaker.checkpoint("256px", 1000)
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        return None

    laptop.aws.responses["FilterLogEvents"] = respond
    laptop.environment["AWS_MAX_ATTEMPTS"] = "1"
    done = laptop("logs", "demo", "--follow")
    assert done.stdout == "algo-1 | a line\n"
    assert "AWS returned ThrottlingException" in done.stderr
    assert "retrying in 5 s" in done.stderr
    assert len(calls) == 3
