"""Signals that end a program, at points that can handle them, and children that end with it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_interrupted_by: list[int] = []


class StopSignal:
    """Remembers a stop: requested, by a spot interruption or at the maximum runtime.

    It arrives as SIGTERM to this process or as the file ``request``, which the first process of a
    SageMaker container creates (estimators/request/entrypoint.py). A file also reaches processes
    that MPI started, and those that start after the signal. A second stop changes nothing, so it
    cannot interrupt the last checkpoint. The first process of a Kubernetes or Slurm node starts the
    launcher with SIGTERM blocked (:func:`block_signals`); one that arrived since is handled now.
    """

    def __init__(self, request: Path) -> None:
        self._request = request
        self._received = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        unblock_sigterm()

    @property
    def requested(self) -> bool:
        return self._received or self._request.exists()

    def confirm(self) -> None:
        """Tell the node's first process that training has stopped before its end.

        The request may have reached another node only.
        """
        self._request.touch()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._received = True


@contextmanager
def block_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Block signals in this thread and, for good, in processes that it starts meanwhile."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def unblock_sigterm() -> None:
    """Receive SIGTERM from now on, in a process that was started with it blocked."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Turn the first termination signal into KeyboardInterrupt and ignore the rest.

    A second one would interrupt the cleanup. Signals that are ignored already (``nohup``) stay
    ignored. Only the main thread may set handlers, so call it there.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        record_interrupt(number)
        for handled in _handled_signals():
            signal.signal(handled, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _installed(interrupt):
        yield


def record_interrupt(number: int) -> None:
    """Record a signal that interrupts this program, before its exception, which may be dropped."""
    _interrupted_by.append(number)


def was_interrupted() -> bool:
    """Return whether a signal has interrupted this program."""
    return bool(_interrupted_by)


def was_terminated() -> bool:
    """Return whether the first signal that interrupted this program was SIGTERM."""
    return _interrupted_by[:1] == [signal.SIGTERM]


def interruption() -> str:
    """Return how a signal has ended this program: by SIGTERM, or as by Ctrl-C."""
    return "terminated" if was_terminated() else "interrupted"


@contextmanager
def record_signals() -> Iterator[Callable[[], None]]:
    """Defer termination signals; the yielded function raises KeyboardInterrupt if one arrived.

    An exception at an arbitrary point could leave the locks of a process pool held forever.
    Signals interrupt the main thread only, so in another one there is nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []

    def raise_if_received() -> None:
        if received:
            record_interrupt(received[0])
            raise KeyboardInterrupt

    with _installed(lambda number, _: received.append(number)):
        yield raise_if_received
        raise_if_received()


def _handled_signals() -> list[signal.Signals]:
    return [
        number for number in _TERMINATION_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextmanager
def _installed(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install ``handler`` for every termination signal; restore the previous handlers on exit."""
    previous = {number: signal.signal(number, handler) for number in _handled_signals()}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


_POLL_SECONDS = 1.0


def _parent() -> BaseProcess:
    """Return the process that started this multiprocessing child."""
    from multiprocessing import parent_process  # a child has loaded it; a command may not need it

    parent = parent_process()
    assert parent is not None
    return parent


def exit_with_parent() -> None:
    """Exit this multiprocessing child when its parent ends, for whatever reason.

    The parent is the process that requested this one, even if a fork server started it.
    """
    parent = _parent()

    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait_for_parent, daemon=True).start()


def exit_at_sigterm_of_parent() -> None:
    """Exit this multiprocessing child at SIGTERM of its parent, and ignore anyone else's.

    Call it before other threads start. Where a process cannot learn who sent a signal (macOS), it
    ends at any SIGTERM.
    """
    parent = _parent()
    if not hasattr(signal, "sigwaitinfo"):
        unblock_sigterm()
        return
    # The signal stays pending until the thread takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    wait_for = signal.sigwaitinfo

    def wait_for_signal() -> None:
        while wait_for({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(0)  # PyTorch reports any other exit code as a failure of the DataLoader

    Thread(target=wait_for_signal, daemon=True).start()


def forward_to_parent(numbers: Sequence[signal.Signals]) -> None:
    """Send the signals that this multiprocessing child gets to its parent, which handles them.

    They are blocked since the child's start. At SIGTERM of the parent itself the child exits.
    Where a process cannot learn who sent a signal (macOS), it ends at any SIGTERM.
    """
    parent = _parent()
    assert parent.pid is not None
    if not hasattr(signal, "sigwaitinfo"):
        unblock_sigterm()
        return
    wait_for, pid = signal.sigwaitinfo, parent.pid

    def forward() -> None:
        while True:
            received = wait_for(numbers)
            if received.si_pid == pid and received.si_signo == signal.SIGTERM:
                os._exit(0)
            with suppress(ProcessLookupError):
                os.kill(pid, received.si_signo)

    Thread(target=forward, daemon=True).start()


def exit_with_launcher() -> None:
    """Exit this program when the process that launched it ends."""
    launcher = os.getppid()

    def poll_launcher() -> None:
        # The kernel gives an orphan another parent.
        while os.getppid() == launcher:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    Thread(target=poll_launcher, daemon=True).start()


def kill_group_after_parent(parent: int, grace: float) -> None:
    """Kill this program's process group ``grace`` seconds after the process ``parent`` has ended.

    The group is this program's own and holds whatever it has started.
    """

    def wait_and_kill() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        time.sleep(grace)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    Thread(target=wait_and_kill, daemon=True).start()
