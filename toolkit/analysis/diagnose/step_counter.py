"""Counts the training steps that a log reports, whichever program wrote it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sm_train.toolkit.analysis.diagnose.line_patterns import (
    BytesMatch,
    is_loading,
    step_in,
    step_pattern,
)

_REMEMBERED = 16
_LOOK_BACK_BYTES = 1 << 12
"""How far before a match the steps are looked for that progress bars repeat after it."""
_REDRAWN_LINES = 2
"""Lines after an error in which a progress bar is no new step: a program's end redraws it."""
_UNFINISHED_BAR = re.compile(rb"\d%\|[^|]*\| +(\d+)/(?!\1\b)")
_STEPS_AFTER_ERROR = 2
"""After an error, one step may be a line that was buffered; two show that training continued."""


@dataclass
class StepCounter:
    """Counts each step once, however many ranks log it, and only while a match may be outlived.

    Before the first match no step is counted, so that healthy logs are scanned at full speed; then
    :meth:`remember` takes the steps just before it, which progress bars repeat.
    """

    count: int = 0
    last_time: float | None = None
    last: str | None = None
    """The progress that the last step logged, such as ``1752/1752``."""
    _recent: deque[bytes] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def remember(self, block: bytes, position: int) -> None:
        """Remember the last steps up to the line at ``position``: a repeated one is no progress."""
        start, end = max(0, position - _LOOK_BACK_BYTES), block.find(b"\n", position)
        for step_match in step_pattern().finditer(block, start, end):
            self._recent.append(step_in(step_match))

    def is_new(self, step_match: BytesMatch, lines_after_error: Callable[[], int]) -> bool:
        """Count the step if it is new; return whether it is.

        ``lines_after_error`` returns the distance to the last match. It counts lines, which takes
        too long for each of the steps that all ranks log.
        """
        step = step_in(step_match)
        # Bars of other ranks that still load the model or data are no progress of the training.
        if step in self._recent or is_loading(step):
            return False
        self._recent.append(step)
        if _UNFINISHED_BAR.search(step) and lines_after_error() <= _REDRAWN_LINES:
            return False
        self.count += 1
        return True


def line_before_last_steps(tail: bytes, last_line: int) -> int:
    """Return the number of the line before the last two steps of a log, 0 if it has not two.

    ``tail`` are whole lines at its end, the last of which is number ``last_line``.
    """
    lines = tail.split(b"\n")[:-1]
    steps: dict[bytes, int] = {}
    for number, line in enumerate(lines, last_line - len(lines) + 1):
        if step_match := step_pattern().search(line):
            steps.setdefault(step_in(step_match), number)
    if len(steps) < _STEPS_AFTER_ERROR:
        return 0
    return sorted(steps.values())[-_STEPS_AFTER_ERROR] - 1
