"""Finds where Python tracebacks end, among the lines of many processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from sm_train.toolkit.log_lines import LogLine

BEGIN = "Traceback (most recent call last)"
CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
"""What stands between an exception and the one that followed from it."""

_FRAME = re.compile(r"^(?:\s|$|[│|+❱╭╰])|^[\^~ ]+$")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*error)(?:: |:?$)")
_MOST_LINES = 2000
"""A traceback that has not ended after so many lines was cut short."""


@dataclass
class _Open:
    """How many tracebacks a speaker has begun, and whether its last line was one of theirs."""

    begun: int
    depth: int
    in_frames: bool = False


@dataclass
class Tracebacks:
    """The tracebacks that are being printed, by speaker; processes may share one."""

    open: dict[tuple[str | None, int | None], _Open] = field(default_factory=dict)

    def ends_with(self, line: LogLine, number: int) -> bool:
        """Whether ``line``, the log's next one of interest, is an open traceback's exception."""
        if BEGIN in line.text:
            depth = self.open[line.speaker].depth if line.speaker in self.open else 0
            self.open[line.speaker] = _Open(number, depth + 1)
            return False
        for speaker in [key for key, one in self.open.items() if number - one.begun > _MOST_LINES]:
            del self.open[speaker]
        state = self.open.get(line.speaker)
        if state is None:
            return False
        frame = _FRAME.match(line.text) is not None
        ended = state.in_frames and not frame and _EXCEPTION.match(line.text) is not None
        state.in_frames = frame
        if ended:
            state.depth -= 1
            if not state.depth:
                del self.open[line.speaker]
        return ended

    def is_frame(self, line: LogLine) -> bool:
        """Whether the line belongs to an open traceback and is no message of its own."""
        return line.speaker in self.open and _FRAME.match(line.text) is not None
