"""``watch`` as a person and as a script see it: pictures, and the real command on a terminal."""

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
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Aws, Cli, clean_environment
from tests.support.job_lifecycle import GROUP
from tests.toolkit.runs.test_run_lifecycle import FIRST, SECOND, Laptop

STEP = {"steps_per_second": 1.8, "loss": 0.25, "data_wait_share": 0.02, "mfu": 0.41}
ON_A_TERMINAL = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# Whatever this process has inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
from sm_train.toolkit.cli import main
main(sys.argv[1:])
"""
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|.)")


# ------------------------------------------------------------------ one look


@pytest.fixture
def laptop(cli: Cli, aws: Aws, tmp_path: Path) -> Laptop:
    return Laptop(cli, aws, tmp_path, budget={"usd": 500})


def train(laptop: Laptop, *, steps: int = 30) -> None:
    """Half an hour of a healthy job on four machines, of which the last is slow and silent."""
    say = laptop.lives.say
    laptop.lives.tell(FIRST, "InProgress", "Training", seconds=1800)
    say(FIRST, "start", ago=1700)
    for number in range(steps):
        say(
            FIRST,
            "step",
            ago=1500 - 1500 / steps * number,
            step=10 + 20 * number,
            **STEP | {"loss": 1.0 / (1 + number)},
        )
    say(FIRST, "checkpoint", ago=400, step=400)
    for node in range(4):
        ranks = [{"rank": 8 * node, "p50": 0.5 if node < 3 else 0.7}]
        say(
            FIRST,
            "heartbeat",
            ago=20 if node < 3 else 700,
            node=node,
            step=590,
            seconds_since_step=2.0,
        )
        say(
            FIRST,
            "node",
            ago=30,
            node=node,
            ranks=ranks,
            data_wait_share_max=0.02,
            gpu_utilization_mean=98.0 - node,
            gpu_utilization_min=90.0,
            gpu_memory_used_max=61 * 2**30,
        )
    say(FIRST, "warning", ago=60, node=1, code="bad-sample", message="3 samples were left out")


def test_once_prints_the_view_and_a_script_gets_all_of_it(laptop: Laptop) -> None:
    train(laptop)
    shown = laptop("watch", "demo", "--once").stderr
    assert max(map(len, shown.splitlines())) <= 100
    assert "demo  256px  training" in shown
    assert "590 of 1,000" in shown
    for words in (
        "it/s     1.8",
        "loss     0.0333",
        "data wait 2.0 %",
        "MFU 41.0 %",
        "step 400, 7 min ago",
        "budget $500",
        "98 %",
        "61 GiB",
        "algo-4: 1.40 × the median step, 0.7 s; rank 24",
        "algo-2 bad-sample: 3 samples were left out",
    ):
        assert words in shown, words
    assert re.search(r"algo-4 +1[12] min", shown)
    assert re.search("[▁▂▃▄▅▆▇█]{10}", shown)
    seen = laptop.json("watch", "demo", "--once")
    assert [node["node"] for node in seen["nodes"]] == ["algo-1", "algo-2", "algo-3", "algo-4"]
    assert seen["nodes"][3]["heartbeat_age_seconds"] == pytest.approx(700, abs=60)
    assert seen["nodes"][0]["gpu_utilization"] == 98.0
    assert [(one["rank"], one["node"]) for one in seen["stragglers"]] == [(24, "algo-4")]
    assert seen["recent_warnings"][0]["code"] == "bad-sample"
    assert (seen["budget_usd"], seen["mfu"], seen["action"]) == (500, 0.41, "wait")
    assert seen["seconds_since_checkpoint"] == pytest.approx(400, abs=60)


def test_gpus_that_no_event_tells_of_are_cloudwatchs_over_their_number(laptop: Laptop) -> None:
    """A machine of eight has up to 800 %; refused metrics end nothing."""
    laptop.lives.say(FIRST, "step", step=40)
    laptop.aws.client("cloudwatch").put_metric_data(
        Namespace=GROUP,
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
    laptop.aws.refusals["GetMetricData"] = "AccessDeniedException"
    assert laptop.json("watch", "demo", "--once")["nodes"][1]["gpu_utilization"] is None


def test_a_stall_is_8_and_its_reason_is_in_the_view(laptop: Laptop) -> None:
    laptop.lives.say(FIRST, "step", ago=4100, step=190, loss=0.5)
    laptop.lives.say(FIRST, "step", ago=4000, step=200, loss=None)
    laptop.lives.say(FIRST, "warning", ago=3000, code="stall", message="no sign for 900 s in step")
    laptop.lives.say(FIRST, "heartbeat", ago=2500, step=200, seconds_since_step=1500.0)
    shown = laptop("watch", "demo", "--once", "--dry-run", code=8).stderr
    assert "demo  256px  stalled" in shown
    assert "stall: no sign for 900 s in step" in shown
    assert "loss     no number" in shown
    assert "is silent since step 200" in shown


# ------------------------------------------------------------------ a terminal


@dataclass
class Terminal:
    """The command on a pseudo-terminal; ``raw`` is everything that it wrote."""

    process: subprocess.Popen[bytes]
    handle: int
    raw: bytes = b""
    at: int = field(default=0)

    def wait_for(self, words: str, seconds: float = 60) -> str:
        """Read until ``words`` are there, written since they were last waited for."""
        deadline = time.monotonic() + seconds
        while words not in self.text[self.at :]:
            assert time.monotonic() < deadline, self.text[-3000:]
            assert self._read(), self.text[-3000:]
        self.at = self.text.rindex(words) + len(words)
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
        except OSError:  # the other end is closed
            return False
        return True

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self.handle, b"\x03")

    def end(self) -> int:
        while self._read():
            pass
        return self.process.wait(60)


@contextmanager
def terminal(laptop: Laptop, *arguments: str, **environment: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    env = clean_environment(laptop.folder) | laptop.environment | {"TERM": "xterm-256color"}
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, "watch", "demo", *arguments],
        env=env | environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def behind_an_empty_page(laptop: Laptop, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Every first page is empty; the second is moto's only one."""
    if body.get("limit") == 9999:
        return None
    if "nextToken" not in body:
        return 200, {"events": [], "nextToken": "more"}
    asked = {key: value for key, value in body.items() if key not in ("nextToken", "_region")}
    events = laptop.aws.client("logs").filter_log_events(**asked, limit=9999)["events"]
    return 200, {"events": events}


def test_the_view_follows_a_living_job_and_ctrl_c_ends_only_the_watch(laptop: Laptop) -> None:
    """Between two looks: steps, a machine whose stream appears later, behind an empty page and a
    refusal.
    """
    train(laptop, steps=5)
    laptop.aws.answers["FilterLogEvents"] = partial(behind_an_empty_page, laptop)
    with terminal(laptop, "--interval", "300s", "--dry-run", NO_COLOR="1") as screen:
        screen.wait_for("next look in")
        laptop.lives.say(FIRST, "step", ago=0, step=777, **STEP)
        screen.wait_for("777 of 1,000")
        laptop.aws.refusals["FilterLogEvents"] = "ThrottlingException"
        screen.wait_for("AWS returned ThrottlingException")
        del laptop.aws.refusals["FilterLogEvents"]
        laptop.lives.say(FIRST, "heartbeat", ago=0, node=11, step=778, seconds_since_step=0.1)
        laptop.lives.say(FIRST, "warning", ago=0, node=11, code="checkpoint-failed", message="full")
        screen.wait_for("algo-12 checkpoint-failed: full")
        screen.interrupt()
        assert screen.end() == 130
    said = screen.text
    assert "the run itself goes on: `sm-train watch demo` looks again" in said
    assert "Traceback" not in said
    assert screen.raw.rstrip().endswith(b"again")
    # The cursor is there again, and no other screen was taken.
    assert screen.raw.rindex(b"\x1b[?25h") > screen.raw.rindex(b"\x1b[?25l")
    assert b"\x1b[?1049h" not in screen.raw
    assert b"\x1b[32m" not in screen.raw
    assert len(laptop.aws.bodies("ListTrainingJobs")) < 8


def test_what_a_look_leads_to_stays_above_the_view(laptop: Laptop) -> None:
    laptop.lives.tell(FIRST, "Failed", reason="InternalServerError: x", ended_ago=3600)
    with terminal(laptop, "--interval", "1s") as screen:
        screen.wait_for(f"started {SECOND} from step 0")
        screen.wait_for("starting")
        laptop.lives.tell(SECOND, "Completed")
        assert screen.end() == 0
    assert "the run is done" in screen.text


def test_expired_credentials_end_the_view_with_their_mend(laptop: Laptop) -> None:
    train(laptop, steps=5)
    with terminal(laptop, "--interval", "1s") as screen:
        screen.wait_for("next look")
        laptop.aws.refusals["ListTrainingJobs"] = "ExpiredTokenException"
        assert screen.end() == 4
    assert "the run itself continues: fix this and watch again" in screen.text


def test_off_a_terminal_there_is_a_line_for_each_look(laptop: Laptop) -> None:
    """Also for one that is refused."""
    train(laptop, steps=5)
    looks: list[int] = []

    def refuse_once(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        looks.append(1)
        if len(looks) == 3:
            laptop.lives.tell(FIRST, "Completed")
        if len(looks) in (2, 3):
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        return None

    laptop.aws.answers["ListTrainingJobs"] = refuse_once
    laptop.environment["AWS_MAX_ATTEMPTS"] = "1"
    said = laptop("watch", "demo", "--interval", "1s").stderr
    assert "\x1b" not in said
    assert "AWS returned ThrottlingException" in said
    assert "looking again in 2 s" in said
    assert "the run is done" in said


# ------------------------------------------------------------------ following


def test_a_followed_log_outlives_refusals_and_empty_pages(laptop: Laptop) -> None:
    """`logs --follow` goes on where a page was refused, and says so once it was."""
    logs = laptop.aws.client("logs")
    logs.create_log_group(logGroupName=GROUP)
    logs.create_log_stream(logGroupName=GROUP, logStreamName=f"{FIRST}/algo-1-1")
    now = int(time.time() * 1000)
    logs.put_log_events(
        logGroupName=GROUP,
        logStreamName=f"{FIRST}/algo-1-1",
        logEvents=[{"timestamp": now - 1000, "message": "a line"}],
    )
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        asked.append(body)
        if len(asked) == 1:
            return 200, {"events": [], "nextToken": "more"}
        if len(asked) == 2:
            assert body["nextToken"] == "more"
            laptop.lives.tell(FIRST, "Completed")
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        return None

    laptop.aws.answers["FilterLogEvents"] = answer
    laptop.environment["AWS_MAX_ATTEMPTS"] = "1"
    done = laptop("logs", "demo", "--follow")
    assert done.stdout == "algo-1 | a line\n"
    assert "AWS returned ThrottlingException" in done.stderr
    assert "asked again in 5 s" in done.stderr
    assert len(asked) == 3
