"""Where a script's loop is, as its heartbeat shows it, and who may stop it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from sm_train.entrypoints.base.signals import StopSignal
from sm_train.entrypoints.monitoring.heartbeat import HeartbeatWriter, Phase


class LoopHeartbeat:
    """The step and phase of one rank's loop.

    ``step`` is the number of synchronized optimizer steps, including the ``first_step`` ones before
    a resume. Until the loop is ``active`` another thread beats for it; from then on only the main
    thread does. ``stop`` is set once this process stops after a step; it stays None while SIGTERM
    is the script's own.
    """

    def __init__(self, writer: HeartbeatWriter, stop_request: Path) -> None:
        self.step, self.first_step = 0, 0
        self.phase = Phase.START
        self.active = False
        self.stop: StopSignal | None = None
        self._writer, self._stop_request = writer, stop_request
        self._handover = threading.Lock()

    def take_over(self) -> None:
        """Take the heartbeat over from the background, and SIGTERM unless the script handles it."""
        if self.active:
            return
        with self._handover:
            self.active = True
        self.enter(Phase.START)
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.stop = StopSignal(self._stop_request)

    def beat(self) -> None:
        """Show that the process lives; from another thread, until the loop is active."""
        with self._handover:
            if not self.active:
                self._writer.enter(Phase.SCRIPT, 0)

    def report_failed_saves(self, count: int) -> None:
        """Report how many checkpoints could not be written since the newest complete one."""
        self._writer.report_failed_saves(count)

    def enter(self, phase: Phase) -> None:
        """Enter ``phase`` (again) at the present step."""
        self.phase = phase
        self._writer.enter(phase, self.step)
