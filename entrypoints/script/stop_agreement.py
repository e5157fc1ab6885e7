"""The step after which all ranks of an observed script stop."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sm_train.entrypoints.distributed.messages import Messages

TICK_SECONDS = 0.5
"""Time between two ticks of the thread that publishes a rank's progress."""
STOP_MARGIN_SECONDS = 4 * TICK_SECONDS
"""How far ahead of the fastest rank the ranks stop: each must hear of the step before it is
there."""

NO_STOP: dict[str, Any] = {"stop": False, "stop_at": None, "stop_refused": None}
"""The status of a rank that has not begun."""


class StopAgreement:
    """Lets all ranks stop after the same step, which none of them has passed.

    Any rank may ask for a stop. Rank 0 then proposes a step ahead of the fastest rank. A rank that
    is not there yet accepts it: that is :attr:`at`. One that has passed it refuses, and rank 0
    proposes a later step. Once all ranks have accepted the same step, rank 0 says so, and
    :attr:`agreed` is set: only then does a rank stop, so none waits for another that went on.

    ``lock`` guards what a rank publishes together. ``step`` returns the steps of this rank.
    """

    def __init__(
        self,
        messages: Messages | None,
        lock: threading.Lock,
        *,
        step: Callable[[], int],
        steps_per_second: Callable[[], float],
    ) -> None:
        self._messages, self._lock = messages, lock
        self._step, self._steps_per_second = step, steps_per_second
        self._requested = False
        self._refused: int | None = None
        self.at: int | None = None
        self.agreed = threading.Event()

    def request(self) -> None:
        """Ask all ranks to stop after the same step."""
        self._requested = True

    def status(self) -> dict[str, Any]:
        """Return what the other ranks must know."""
        return {"stop": self._requested, "stop_at": self.at, "stop_refused": self._refused}

    def stop_alone(self) -> None:
        """Stop a single process after its current step, if a stop was requested."""
        if self._requested and self.at is None:
            self.at = self._step()
            self.agreed.set()

    def answer(self) -> None:
        """Accept or refuse the proposed step, and notice when all ranks have accepted it."""
        assert self._messages is not None
        proposed = None if self.agreed.is_set() else self._messages.get_json("stop")
        if proposed is not None:
            with self._lock:
                if proposed != self.at and proposed != self._refused:
                    if self._step() < proposed:
                        self.at = proposed
                    else:
                        self._refused = proposed
        if self.at is not None and self._messages.has([f"stop-agreed/{self.at}"]):
            self.agreed.set()

    def propose(self, statuses: Sequence[dict[str, Any]]) -> None:
        """Propose a step to all ranks, whose ``statuses`` are given, or confirm it; on rank 0."""
        assert self._messages is not None
        if self.agreed.is_set():
            return
        proposed = self._messages.get_json("stop")
        if proposed is None:
            if not any(status["stop"] for status in statuses):
                return
        elif all(status["stop_at"] == proposed for status in statuses):
            self._messages.put(f"stop-agreed/{proposed}", b"")
            return
        elif not any(status["stop_refused"] == proposed for status in statuses):
            return
        fastest = max(self._step(), *(status["step"] for status in statuses))
        margin = max(2, math.ceil(STOP_MARGIN_SECONDS * self._steps_per_second()))
        self._messages.put_json("stop", fastest + margin)
