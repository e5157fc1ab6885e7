"""Finds where Python tracebacks end, among the lines of many processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from sm_train.toolkit.log_lines import LogLine

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
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*error)(?:: |:?$)")
_MOST_LINES = 2000
"""A traceback that has not ended after so many lines was cut short."""


Found = Literal["exception", "harmless", "frame", "other"]
"""A traceback's last line (of one that ends no process), a line inside one, or any other."""


@dataclass
class _Open:
    """How many tracebacks a speaker has begun, and whether its last line was one of theirs."""

    begun: int
    depth: int
    harmless: bool = False
    in_frames: bool = False


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
        if state is None:
            return "other"
        frame = _FRAME.match(line.text) is not None
        ended = state.in_frames and not frame and _EXCEPTION.match(line.text) is not None
        state.in_frames = frame
        if ended:
            state.depth -= 1
            if not state.depth:
                del self.open[line.speaker]
            return "harmless" if state.harmless else "exception"
        return "frame" if frame else "other"
