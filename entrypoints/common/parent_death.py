"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import os
import time
from multiprocessing import parent_process
from threading import Thread


def exit_with_parent() -> None:
    """Let this process end when its parent does, however that ends.

    The parent is the process that asked for this one, also where a fork server started it.
    """
    parent = parent_process()
    assert parent is not None

    def wait_for_end() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait_for_end, daemon=True).start()


def exit_with_launcher() -> None:
    """The same for a process that was started as a program."""
    starter = os.getppid()

    def look() -> None:
        while os.getppid() == starter:
            time.sleep(1.0)
        os._exit(1)

    Thread(target=look, daemon=True).start()
