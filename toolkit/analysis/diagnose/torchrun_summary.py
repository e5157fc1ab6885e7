"""Reads torchrun's summary of the first failure at the end of a log."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sm_train.toolkit.analysis.diagnose.log_lines import LogLine, parse_line
from sm_train.toolkit.analysis.diagnose.matches import TorchrunFailure

# Negative exit codes of torchrun are signals: SIGKILL, SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE.
_SIGNALS: dict[int | None, str] = {
    -9: "process-killed",
    -11: "segfault",
    -7: "bus-error",
    -6: "aborted",
    -4: "fatal-signal",
    -8: "fatal-signal",
}
_LAUNCHER = "launcher"
"""Key of the summary for the node that printed it; not one of its fields."""
_FIELDS = {"time", "host", "rank", "exitcode", "error_file", "traceback", "msg"}
_NUMBER = re.compile(r"-?\d+")


@dataclass
class TorchrunSummary:
    """Reads summaries line by line: :meth:`begin`, then :meth:`read` until it returns False.

    ``first`` is the earliest failure of all launchers, each of which reports its own.
    """

    reference: float
    first: TorchrunFailure | None = None
    ended: TorchrunFailure | None = None
    """The failure of the summary that ended last."""
    _fields: dict[str, str] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the lines of a summary are being read."""
        return self._fields is not None

    def begin(self, launcher: str | None) -> None:
        """Begin with a summary that was printed on the node ``launcher``."""
        self._fields = {_LAUNCHER: launcher or ""}

    def read(self, line: LogLine) -> bool:
        """Read a line of the open summary; return False, and set ``ended``, after its end.

        Its lines are ``[0]:`` and ``name : value``, as ``  rank      : 11 (local_rank: 3)``.
        """
        assert self._fields is not None
        name, colon, value = line.text.partition(":")
        if line.text.strip().startswith("[") or (colon and name.strip() in _FIELDS):
            self._fields[name.strip()] = value.strip()
            return True
        self.ended, self._fields = self._failure(self._fields), None
        if self.first is None or (self.ended.time or 0.0) < (self.first.time or 0.0):
            self.first = self.ended
        return False

    def _failure(self, fields: dict[str, str]) -> TorchrunFailure:
        rank, exit_code = (_NUMBER.search(fields.get(key, "")) for key in ("rank", "exitcode"))
        return TorchrunFailure(
            int(rank[0]) if rank else None,
            parse_line(fields.get("time", ""), self.reference).time,
            int(exit_code[0]) if exit_code else None,
            fields.get("host"),
            fields[_LAUNCHER] or None,
        )


def signal_match(failure: TorchrunFailure) -> tuple[str, LogLine] | None:
    """Return the code and the line of a failure by a signal, None if it was no signal."""
    code = _SIGNALS.get(failure.exit_code)
    if code is None:
        return None
    text = f"first observed failure: exit code {failure.exit_code}"
    return code, LogLine(text, failure.time, None, failure.rank, failure.host or None)
