"""A job's log lines from CloudWatch, once or as they come."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from sm_train.entrypoints.common.events import PREFIX
from sm_train.toolkit.aws.cloudwatch_logs import Entry, search
from sm_train.toolkit.errors import TRANSIENT, UserError
from sm_train.toolkit.jobs.training_job import find_job

_ASK_SECONDS = 5.0
"""Between two questions: CloudWatch Logs allows an account about five FilterLogEvents a second."""

_LONGEST_SECONDS = 120.0
"""Between two questions of which the first was refused."""

_LATE_SECONDS = 60.0
"""A line may become visible so much later than lines that are younger.

One that is later still is missed. GetLogEvents with the token of the time before misses some, too
(github.com/aws/aws-sdk-cpp/issues/1073). It also takes no filter, and a call for each machine every
time: when a stream was last written to, DescribeLogStreams may know an hour later (CloudWatch Logs
API reference, LogStream; November 2026).
"""


class LogFollower:
    """What the streams that begin with ``streams`` say since a moment (Unix seconds), each line
    once. Streams that appear later are followed, too.

    Refusals that may pass are waited for: ``pause`` is how long to wait before the next question,
    ``refused`` what the last one was answered with.
    """

    def __init__(
        self, session: Any, streams: str, since: float, *, pattern: str | None = None
    ) -> None:
        self._session, self._streams, self._pattern = session, streams, pattern
        self._since = since
        self._shown: dict[str, float] = {}
        self.pause = _ASK_SECONDS
        self.refused: UserError | None = None

    def ask(self) -> Iterator[Entry]:
        """The lines that are new.

        Raises:
            UserError: AWS refuses for good.
        """
        newest = self._since
        try:
            for line in search(
                self._session, self._streams, pattern=self._pattern, since=self._since
            ):
                newest = max(newest, line.time)
                if line.id not in self._shown:
                    self._shown[line.id] = line.time
                    yield line
        except UserError as error:
            if error.exit_code not in TRANSIENT:
                raise
            # Of the pages after this one nothing is known: the next question is the same again.
            if self.refused is not None:
                self.pause = min(2 * self.pause, _LONGEST_SECONDS)
            self.refused = error
            return
        self.refused, self.pause = None, _ASK_SECONDS
        self._since = max(self._since, newest - _LATE_SECONDS)
        self._shown = {line: at for line, at in self._shown.items() if at >= self._since}


def follow_log(
    session: Any, job: str, streams: str, since: float, tell: Callable[[str], None]
) -> Iterator[Entry]:
    """What the streams say, and what comes until the job has ended; ``tell`` hears of trouble."""
    follower = LogFollower(session, streams, since)
    while True:
        live = _is_live(session, job)
        yield from follower.ask()
        if follower.refused is not None:
            tell(f"{follower.refused}; asked again in {follower.pause:.0f} s")
        elif not live:
            return
        time.sleep(follower.pause)


def _is_live(session: Any, job: str) -> bool:
    """Whether the job may still say something."""
    try:
        found = find_job(session, job)
    except UserError as error:
        if error.exit_code not in TRANSIENT:
            raise
        return True
    return found is not None and found.live


def show_line(line: Entry, *, raw: bool, as_json: bool) -> None:
    """Print a line; events have a readable twin, so they are left out unless ``raw``."""
    text = line.message.rstrip("\n")
    if PREFIX + "{" in text and not raw:
        return
    shown = f"{line.host} | {text}"
    if as_json:
        shown = json.dumps({"time": line.time, "node": line.host, "text": text})
    sys.stdout.write(shown + "\n")
    sys.stdout.flush()
