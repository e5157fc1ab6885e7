"""Finds where Python tracebacks end, among the lines of many processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from sm_train.toolkit.diagnose.log_lines import LogLine

BEGIN = "Traceback (most recent call last)"
CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    # What a DataLoader raises for its worker, with the worker's own traceback in the message.
    "Original Traceback (most recent call last)",
)
"""What stands between an exception and the one that tells more."""
IGNORED = ("Exception ignored in", "--- Logging error ---", "Error in atexit._run_exitfuncs")
"""What stands before a traceback that ends no process."""

_FRAME = re.compile(r"^(?:\s|$|[│|+❱╭╰])|^[\^~ ]+$")
_PLACE = re.compile(r'^File "[^"]+", line \d+')
"""A frame that has lost its indentation: the SDK's launchers strip every line."""
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*error)(?:: |:?$)")
_MOST_LINES = 2000
"""A traceback that has not ended after so many lines was cut short."""
_MOST_SOURCE_LINES = 8
"""So many lines of source may follow a frame without indentation."""

Found = Literal["exception", "harmless", "frame", "other"]
"""A traceback's last line (of one that ends no process), a line inside one, or any other."""


@dataclass
class _Open:
    """How many tracebacks a speaker has begun; ``since`` counts its lines after the last frame."""

    begun: int
    depth: int
    harmless: bool = False
    since: int = _MOST_SOURCE_LINES
    stripped: bool = False


@dataclass
class Tracebacks:
    """The tracebacks that are being printed, by speaker; processes may share one."""

    open: dict[tuple[str | None, int | None], _Open] = field(default_factory=dict)
    _harmless: dict[tuple[str | None, int | None], int] = field(default_factory=dict)
    """The line at which a speaker said that its next traceback does not matter."""

    def feed(self, line: LogLine, number: int) -> Found:
        """What the log's next line of interest is: an open traceback's exception, or not."""
        if BEGIN in line.text:
            depth = self.open[line.speaker].depth if line.speaker in self.open else 0
            harmless = number - self._harmless.pop(line.speaker, -1000) <= 2
            self.open[line.speaker] = _Open(number, depth + 1, harmless)
            return "frame"
        if any(text in line.text for text in IGNORED):
            self._harmless[line.speaker] = number
        for speaker in [key for key, one in self.open.items() if number - one.begun > _MOST_LINES]:
            del self.open[speaker]
        state = self.open.get(line.speaker)
        return "other" if state is None else self._inside(state, line)

    def _inside(self, state: _Open, line: LogLine) -> Found:
        if _PLACE.match(line.text):
            state.stripped = True
        elif _FRAME.match(line.text) is None:
            source = state.since < (_MOST_SOURCE_LINES if state.stripped else 1)
            state.since += 1
            if not source:
                return "other"
            if _EXCEPTION.match(line.text) is None:
                return "frame" if state.stripped else "other"
            self._close(state, line)
            return "harmless" if state.harmless else "exception"
        state.since = 0
        return "frame"

    def _close(self, state: _Open, line: LogLine) -> None:
        state.depth -= 1
        state.since = _MOST_SOURCE_LINES
        if not state.depth:
            del self.open[line.speaker]
