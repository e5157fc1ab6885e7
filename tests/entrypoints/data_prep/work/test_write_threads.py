"""Threads that write files, and an interrupt at the moment at which one starts."""

from __future__ import annotations

import subprocess
import sys
from threading import Thread

import pytest
from sm_train.entrypoints.data_prep.work.write_threads import write_in_threads

from tests.support.deadline import DEADLINE

INTERRUPTED_START = """
import os, signal, threading, time
from sm_train.entrypoints.base.signals import raise_on_signals
from sm_train.entrypoints.data_prep.work.write_threads import write_in_threads

started, finished = [], []

def write(item):
    started.append(item)
    time.sleep(0.2)
    finished.append(item)

start = threading.Thread.start

def start_and_interrupt(thread):
    start(thread)
    while not started:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread.start = start_and_interrupt
try:
    with raise_on_signals():
        write_in_threads(write, range(100), 2)
except KeyboardInterrupt:
    print(finished == started, len(started) < 100)
"""


def test_an_interrupt_while_a_thread_starts_waits_for_its_write() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_START],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE,
    )
    assert (done.stdout, done.stderr) == ("True True\n", "")


def test_results_are_in_order_and_an_error_is_raised() -> None:
    assert write_in_threads(lambda item: item * item, range(5), 3) == [0, 1, 4, 9, 16]
    with pytest.raises(OSError, match="full"):
        write_in_threads(lambda _: (_ for _ in ()).throw(OSError("full")), range(5), 3)


def test_another_thread_than_the_main_one_may_write() -> None:
    results: list[int] = []
    thread = Thread(target=lambda: results.extend(write_in_threads(abs, [-1, -2], 2)))
    thread.start()
    thread.join()
    assert results == [1, 2]
