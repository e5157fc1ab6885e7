"""Ends child processes together with the process that started them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import parent_process
from threading import Thread

from sm_train.entrypoints.common.signals import unblock_sigterm

_POLL_SECONDS = 1.0


def exit_with_parent() -> None:
    """Exit this multiprocessing child when its parent ends, for whatever reason.

    The parent is the process that requested this one, even if a fork server started it.
    """
    parent = parent_process()
    assert parent is not None

    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait_for_parent, daemon=True).start()


def exit_at_sigterm_of_parent() -> None:
    """Exit this multiprocessing child at SIGTERM of its parent, and ignore anyone else's.

    Call it before other threads start. Where a process cannot learn who sent a signal (macOS), it
    ends at any SIGTERM.
    """
    parent = parent_process()
    assert parent is not None
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
    parent = parent_process()
    assert parent is not None
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
