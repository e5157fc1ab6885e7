"""Which of several failed processes ended the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.monitoring.first_failure import (
    Failure,
    FailureLog,
    cause,
    death,
    exception,
    is_disconnection,
)
from sm_train.entrypoints.monitoring.watchdog.exit_watcher import ExitWatcher

from tests.support.deadline import DEADLINE

DISCONNECTED = [
    # Gloo, after a peer was killed (PyTorch 2.13).
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer "
    "[127.0.0.1]:11883",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error "
    "[127.0.0.1]:41231: Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    # https://github.com/NVIDIA/nccl/issues/2076
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/"
    "ProcessGroupNCCL.cpp:1333, remote process exited or there was a network error",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
]


def failed(kind: str, rank: int = 0) -> Failure:
    return Failure(kind, f"rank {rank}", 0, rank)


@pytest.mark.parametrize("text", DISCONNECTED)
def test_exceptions_of_a_lost_connection_are_disconnections(text: str) -> None:
    assert is_disconnection(text)
    assert exception(text, node=0, rank=1, where="in step").kind == "disconnected"


@pytest.mark.parametrize(
    "text", ["RuntimeError: CUDA out of memory", "ValueError: closed by the user", "KeyError: 'a'"]
)
def test_exceptions_of_the_program_are_errors(text: str) -> None:
    failure = exception(f"{text}\nsecond line", node=0, rank=1, where="in step after step 5")
    assert failure == Failure("error", f"rank 1 failed in step after step 5: {text}", 0, 1)


def test_text_names_the_signal() -> None:
    def text(exit_code: int | None) -> tuple[str, str]:
        failure = death(exit_code, node=1, rank=3, where="in step after step 5")
        return failure.kind, failure.text

    died = "rank 3 died without an error in step after step 5"
    assert text(None) == ("died", f"{died}: killed, or out of memory")
    assert text(7) == ("killed", f"{died}: exit code 7")
    kind, explained = text(-signal.SIGKILL)
    assert (kind, explained) == (
        "killed",
        f"{died}: SIGKILL (usually the kernel out of memory, or a user)",
    )
    assert text(-signal.SIGSEGV)[0] == "killed"
    assert text(-signal.SIGTERM)[0] == "terminated"
    assert text(-signal.SIGABRT)[0] == "aborted"
    assert text(-64) == ("killed", f"{died}: SIGRTMAX")
    assert text(-50) == ("killed", f"{died}: signal 50")


@pytest.mark.parametrize(
    ("kinds", "index"),
    [
        (["disconnected", "disconnected", "killed"], 2),
        (["disconnected", "died"], 1),
        # torchrun terminated the second one after the first one's exception.
        (["error", "died"], 0),
        (["error", "disconnected", "terminated"], 0),
        # The exception came after the death.
        (["died", "error"], 0),
        (["terminated", "disconnected"], 1),
        (["aborted", "disconnected", "error"], 2),
        (["disconnected", "terminated", "disconnected"], 0),
    ],
)
def test_cause_is_the_failure_that_explains_the_others(kinds: Sequence[str], index: int) -> None:
    failures = [failed(kind, rank) for rank, kind in enumerate(kinds)]
    assert cause(failures) == failures[index]


@given(
    st.lists(st.sampled_from(["disconnected", "terminated", "aborted"]), max_size=7),
    st.integers(0, 7),
)
def test_a_killed_rank_is_the_cause_whenever_it_is_seen(others: list[str], position: int) -> None:
    kinds = [*others[:position], "killed", *others[position:]]
    failures = [failed(kind, rank) for rank, kind in enumerate(kinds)]
    assert cause(failures).kind == "killed"


def test_a_disconnection_waits_for_its_cause_and_is_reported_without_one() -> None:
    log, killed = FailureLog(), failed("killed", 1)
    assert log.take_report(0.0, final=True) is None
    log.add([failed("disconnected")], 10.0)
    assert log.take_report(10.0 + 2.0 / 2, final=False) is None
    log.add([failed("disconnected")], 11.0)
    assert log.take_report(10.0 + 2.0, final=False) == failed("disconnected")
    assert log.take_report(99.0, final=True) is None
    # A likelier cause that is seen too late is reported as well; an unlikelier one is not.
    log.add([killed, failed("terminated", 2)], 99.0)
    assert log.take_report(99.0, final=False) == killed
    assert log.take_report(199.0, final=True) is None


def test_a_killed_process_is_reported_at_once() -> None:
    log = FailureLog()
    log.add([failed("disconnected"), failed("killed", 1)], 10.0)
    assert log.take_report(10.0, final=False) == failed("killed", 1)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_exit_of_another_process_wakes_up_with_its_signal(signal_number: int) -> None:
    """The process is a grandchild in effect: its parent reaps it only later."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    read, write = os.pipe()
    try:
        watcher = ExitWatcher()
        with os.fdopen(read) as source:
            watcher.watch([process.pid])
            watcher.watch([process.pid])
            process.send_signal(signal_number)
            assert not watcher.wait(source, DEADLINE)
            assert watcher.exit_codes == {process.pid: -signal_number}
            os.close(write)
            assert watcher.wait(source, DEADLINE)
    finally:
        process.kill()
        process.wait()
