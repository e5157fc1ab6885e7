"""Finds the last lines of Python tracebacks among the interleaved lines of many processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from sm_train.toolkit.diagnose.log_lines import LogLine

BEGIN = "Traceback (most recent call last)"
CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
    # A DataLoader re-raises the error of its worker with the worker's traceback in the message.
    "Original Traceback (most recent call last)",
)
"""Lines between a chained exception and the one that replaces it."""
IGNORED = ("Exception ignored in", "--- Logging error ---", "Error in atexit._run_exitfuncs")
"""Lines before a traceback that does not end its process."""

# "  File "train.py", line 3", source lines, rich's box "│ /opt/ml/code/train.py:88", "    ^^^^^^"
_FRAME = re.compile(r"^(?:\s|$|[│|+❱╭╰])|^[\^~ ]+$")
# 'File "/opt/ml/code/train.py", line 88, in main' without indentation: SageMaker's launchers strip
# every line.
_STRIPPED_FRAME = re.compile(r'^File "[^"]+", line \d+')
# "torch.OutOfMemoryError: CUDA out of memory", "KeyError: 'x'", "_queue.Empty", "socket.error:"
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|\w*error)(?:: |:?$)")
_MAX_LINES = 2000
"""A traceback that has not ended after this many lines is taken as truncated."""
_MAX_SOURCE_LINES = 8
"""Lines of source that may follow a frame without indentation."""

TracebackPart = Literal["exception", "harmless", "frame", "other"]
"""The last line of a traceback (``harmless``: it does not end its process), another line of it, or
any other line."""


@dataclass
class _Open:
    """A traceback that has not ended: ``depth`` counts nested ones.

    ``lines_since_frame`` counts the source's lines after the last frame; ``stripped`` means that
    its frames have no indentation.
    """

    first_line: int
    depth: int
    harmless: bool = False
    lines_since_frame: int = _MAX_SOURCE_LINES
    stripped: bool = False


@dataclass
class Tracebacks:
    """The open tracebacks by source, a node and rank; processes may share a source."""

    open: dict[tuple[str | None, int | None], _Open] = field(default_factory=dict)
    _ignored_at: dict[tuple[str | None, int | None], int] = field(default_factory=dict)
    """The line number at which a source announced that its next traceback is ignored."""

    def feed(self, line: LogLine, number: int) -> TracebackPart:
        """Classify the next line of the log, ``number``."""
        if BEGIN in line.text:
            depth = self.open[line.source].depth if line.source in self.open else 0
            harmless = number - self._ignored_at.pop(line.source, -1000) <= 2
            self.open[line.source] = _Open(number, depth + 1, harmless)
            return "frame"
        if any(text in line.text for text in IGNORED):
            self._ignored_at[line.source] = number
        for source in [
            key for key, one in self.open.items() if number - one.first_line > _MAX_LINES
        ]:
            del self.open[source]
        state = self.open.get(line.source)
        return "other" if state is None else self._inside(state, line)

    def _inside(self, state: _Open, line: LogLine) -> TracebackPart:
        if _STRIPPED_FRAME.match(line.text):
            state.stripped = True
        elif _FRAME.match(line.text) is None:
            # With indentation, the exception follows the last frame directly; without, source lines
            # look like any other line, so a few of them are accepted.
            may_belong = state.lines_since_frame < (_MAX_SOURCE_LINES if state.stripped else 1)
            state.lines_since_frame += 1
            if not may_belong:
                return "other"
            if _EXCEPTION.match(line.text) is None:
                return "frame" if state.stripped else "other"
            self._close(state, line)
            return "harmless" if state.harmless else "exception"
        state.lines_since_frame = 0
        return "frame"

    def _close(self, state: _Open, line: LogLine) -> None:
        state.depth -= 1
        state.lines_since_frame = _MAX_SOURCE_LINES
        if not state.depth:
            del self.open[line.source]
