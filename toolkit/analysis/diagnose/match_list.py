"""The lines of a log that may have ended the job, while it is scanned."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sm_train.toolkit.analysis.diagnose.matches import PROGRAM_ERROR, STEPS_TO_RECOVER, Match

_MAX_PER_CODE = 64
_HARMLESS_REMEMBERED = 16
_CHAIN_LINES = 6
"""Lines between an exception and another one that was raised while it was handled."""


@dataclass
class MatchList:
    """Matches in order of their lines, without those that the training outlived.

    A match leaves the list in one of three ways. Three further steps or the end of the training
    show that the program recovered (:meth:`recover`). A later line shows that its cause is gone
    (:meth:`remove`). Or it led to another exception, which replaces it (:meth:`remove_chained`).
    ``per_code`` counts the matches in the list, of which it keeps the first 64 of each code;
    ``last_line`` knows the last one of them all.
    """

    matches: list[Match] = field(default_factory=list)
    per_code: Counter[str] = field(default_factory=Counter)
    last_line: dict[str, int] = field(default_factory=dict)
    recovered: Counter[str] = field(default_factory=Counter)
    warnings: dict[str, Match] = field(default_factory=dict)
    harmless: deque[int] = field(default_factory=lambda: deque(maxlen=_HARMLESS_REMEMBERED))
    """The last lines with exceptions that did not end their process."""
    handled: Match | None = None
    """The exception during whose handling another one is being raised."""

    def __bool__(self) -> bool:
        return bool(self.matches)

    @property
    def last(self) -> Match | None:
        """The match that was added last."""
        return self.matches[-1] if self.matches else None

    def is_full(self, codes: Iterable[str]) -> bool:
        """Return whether the list has enough matches of every one of ``codes``."""
        return all(self.per_code[code] >= _MAX_PER_CODE for code in codes)

    def is_wanted(self, code: str, role: str) -> bool:
        """Return whether a further match of ``code`` would be kept."""
        return code not in self.warnings if role == "warning" else not self.is_full([code])

    def add(self, match: Match) -> None:
        """Add a match, the last one so far."""
        if match.role == "warning":
            self.warnings[match.code] = match
        else:
            self.matches.append(match)
            self.per_code[match.code] += 1

    def pop(self) -> None:
        """Remove the match that was added last."""
        self.per_code[self.matches.pop().code] -= 1

    def mark_in_library(self) -> None:
        """Note that an installed library raised the last match."""
        self.matches[-1] = replace(self.matches[-1], in_library=True)

    def mark_loose(self, count: int) -> None:
        """Note that only a mention in an exception shows the last ``count`` matches."""
        self.matches[-count:] = [replace(match, loose=True) for match in self.matches[-count:]]

    def remove(self, code: str) -> None:
        """Remove all matches of ``code``: their cause is gone."""
        self.recovered[code] += self.per_code.pop(code, 0)
        self.matches = [match for match in self.matches if match.code != code]

    def recover(self, steps: int | None = None) -> None:
        """Remove the matches that did not end the job: all, or those that ``steps`` outlived."""
        count = len(self.matches)
        if steps is not None:
            # Matches are ordered by steps_before, so the outlived ones come first.
            count = bisect_right(
                self.matches, steps - STEPS_TO_RECOVER, key=lambda match: match.steps_before
            )
        codes = Counter(match.code for match in self.matches[:count])
        self.recovered += codes
        self.harmless.extend(match.order for match in self.matches[:count])
        self.per_code -= codes
        del self.matches[:count]

    def restore_handled(self, rank: int | None, *, is_in_handler: bool) -> bool:
        """Add the handled exception again if the next one is only a consequence of its handler."""
        handled, self.handled = self.handled, None
        if not handled or handled.rank != rank or not is_in_handler:
            return False
        self.add(handled)
        return True

    def remove_chained(self, rank: int | None, number: int, *, is_cause: bool) -> None:
        """Remove an exception that led to another, on line ``number``, which ended the process.

        If it is the direct cause of the other one, it remains if its kind is known.
        """
        for index in reversed(range(len(self.matches))):
            match = self.matches[index]
            if number - match.order > _CHAIN_LINES:
                return
            if match.role == "cause" and match.rank == rank:
                # It was raised, even if its traceback is cut off.
                self.matches[index] = replace(match, uncaught=True)
                return
            if match.role == "exception" and match.rank == rank:
                if match.code != PROGRAM_ERROR and is_cause:
                    return
                del self.matches[index]
                self.per_code[match.code] -= 1
                self.handled = match
                return

    def at_end(self) -> tuple[Match, ...]:
        """Return the matches at the end of the log."""
        # The exception that would have replaced the handled one is missing: the log ends before.
        says_more = self.handled is not None and not self.handled.text.endswith(":")
        return (*self.matches, *((self.handled,) if self.handled and says_more else ()))
