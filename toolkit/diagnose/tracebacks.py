"""Finds the last lines of Python tracebacks among the interleaved lines of many processes.

The line that opens a traceback also shows the prefix which a launcher, a logger or a log viewer puts
before every line: whatever stands before it. The pattern of that prefix is learned, unless the next
lines of the traceback come without it, as after a progress bar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from sm_train.toolkit.diagnose.log_lines import LogLine, Source, prefix_pattern

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
# The first frame of a traceback, with or without indentation, or of a rich one.
_FRAME_START = re.compile(r'^\s*(?:File "|│)')
# "Original Traceback", "  + Exception Group Traceback", "Scheduler hit an exception: Traceback",
# "  0% 0/3000 [00:00<?, ?it/s]Traceback"
_NO_PREFIX = re.compile(r"(?:Original|Group) $|it/s[^\]]*\]\s*$")
_MAX_PREFIX = 200
_MAX_PREFIXES = 64
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

    open: dict[Source, _Open] = field(default_factory=dict)
    _ignored_at: dict[Source, int] = field(default_factory=dict)
    """The line number at which a source announced that its next traceback is ignored."""
    prefixes: list[re.Pattern[str]] = field(default_factory=list)
    """The learned prefixes, for parsing further lines."""
    _assumed: dict[Source, tuple[Source, re.Pattern[str]]] = field(default_factory=dict)
    """A source without a learned prefix → the source and the pattern assumed for its traceback."""

    def learn_prefix(self, line: LogLine) -> bool:
        """Learn the prefix that precedes the start of a traceback; False if there is none to learn."""
        before = line.text[: line.text.find(BEGIN)]
        # A rich traceback's box, the word of a nested or grouped one, and text that ends a sentence
        # are no prefix.
        before = before.partition("╭")[0]
        if not before.strip() or _NO_PREFIX.search(before) or len(before) > _MAX_PREFIX:
            return False
        pattern = prefix_pattern(before)
        if pattern in self.prefixes or len(self.prefixes) == _MAX_PREFIXES:
            return False
        self.prefixes.append(pattern)
        return True

    def assume(self, bare: LogLine, prefixed: LogLine) -> None:
        """Note that the traceback of ``bare``'s source may continue without the learned prefix."""
        self._assumed[bare.source] = prefixed.source, self.prefixes[-1]

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
        state = self.open.get(line.source) or self._without_prefix(line)
        return "other" if state is None else self._inside(state, line)

    def _without_prefix(self, line: LogLine) -> _Open | None:
        """Return the traceback that ``line`` continues without the prefix assumed for it."""
        if line.source not in self._assumed or not _FRAME_START.match(line.text):
            return None
        source, pattern = self._assumed.pop(line.source)
        if source not in self.open:
            return None
        if pattern in self.prefixes:
            self.prefixes.remove(pattern)
        state = self.open[line.source] = self.open.pop(source)
        return state

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
