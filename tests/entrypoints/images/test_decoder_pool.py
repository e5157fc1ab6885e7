"""Decoder processes: a crash costs one image, and no process outlives its client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from sm_train.entrypoints.images import decoder_pool
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from sm_train.entrypoints.images.image_header import DecodeError

from tests.support.deadline import DEADLINE
from tests.support.images import crashing_decoders
from tests.support.images.crashing_decoders import CRASH, resize


@pytest.fixture
def pool() -> Iterator[DecoderPool]:
    started = DecoderPool(2)
    yield started
    started.close()


def test_results_and_errors_are_those_of_the_function(pool: DecoderPool) -> None:
    assert pool.call(crashing_decoders.measure, b"seven..") == 7
    # Larger than a message, and larger than the memory shared at first.
    for factor in (1, 1000, 300_000):
        assert (
            pool.call(crashing_decoders.multiply, b"0123456789", factor) == b"0123456789" * factor
        )
    assert pool.call(crashing_decoders.measure, bytes(100_000_000)) == 100_000_000
    with pytest.raises(RuntimeError, match=r"(?s)ZeroDivisionError.*3 bytes.*in fail"):
        pool.call(crashing_decoders.fail, b"abc")
    assert pool.call(crashing_decoders.measure, b"") == 0


def test_decoders_resize_after_the_client_has_used_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork has none of OpenMP's threads, and a parallel loop in it would wait for them."""
    monkeypatch.setattr(decoder_pool, "DECODE_SECONDS", 60.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    resize(torch.rand(1, 3, 2000, 2000))
    started = DecoderPool(1)
    try:
        assert started.call(crashing_decoders.resized_sum, b"\x07") > 0
    finally:
        started.close()
        torch.set_num_threads(threads)


def test_output_is_copied_to_the_callers_array(pool: DecoderPool) -> None:
    for size in (3, 5_000_000):
        out = np.zeros((size, 2), np.uint8)
        pool.fill(crashing_decoders.write_first_byte, b"\x05", out, 2)
        assert (out == 7).all()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"SIGSEGV", "killed by SIGSEGV"),
        (b"SIGABRT", "killed by SIGABRT"),
        (b"SIGKILL", "killed by SIGKILL"),
        (b"0", "ended with exit code 0"),
        (b"1", "ended with exit code 1"),
    ],
)
def test_a_crash_costs_one_image(pool: DecoderPool, content: bytes, cause: str) -> None:
    for _ in range(3):
        with pytest.raises(DecodeError, match=f"decoder-crash: .*{cause}"):
            pool.call(crashing_decoders.end_as, content)
        assert pool.call(crashing_decoders.measure, b"next") == 4


def test_an_image_in_flight_by_accident_is_decoded_again(pool: DecoderPool, tmp_path: Path) -> None:
    marker = tmp_path / "crashed"
    assert pool.call(crashing_decoders.crash_once, b"12345", marker) == 5
    assert marker.exists()


def test_threads_get_the_results_of_their_own_images(pool: DecoderPool) -> None:
    contents = [CRASH if number % 10 == 3 else bytes(number) for number in range(120)]

    def measure(content: bytes) -> int | str:
        try:
            return pool.call(crashing_decoders.measure, content)
        except DecodeError as error:
            return error.reason

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(measure, contents))
    assert results == [
        "decoder-crash" if content == CRASH else len(content) for content in contents
    ]


def test_a_decoder_that_hangs_is_ended(pool: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_pool, "DECODE_SECONDS", 0.5)
    with pytest.raises(DecodeError, match="decoder-timeout"):
        pool.call(crashing_decoders.never_end, b"")
    monkeypatch.undo()
    for _ in range(4):
        assert pool.call(crashing_decoders.measure, b"next") == 4


_CLIENT = """
import os, sys
from sm_train.entrypoints.images.decoder_pool import DecoderPool
from tests.support.images import crashing_decoders
pool = DecoderPool(1)
print(pool.call(crashing_decoders.measure, b"abc"), flush=True)
if sys.argv[1] == "busy":
    pool.call(crashing_decoders.never_end, b"")
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_no_process_outlives_its_client(state: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CLIENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"3\n"
        processes = psutil.Process(client.pid).children(recursive=True)
        assert len(processes) == 2  # the supervisor and the decoder
        os.kill(client.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, DEADLINE)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_decoders_survive_the_signals_of_a_terminal(pool: DecoderPool) -> None:
    supervisor = psutil.Process(pool._supervisor)
    for process in [supervisor, *supervisor.children()]:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
    for _ in range(4):
        assert pool.call(crashing_decoders.measure, b"abc") == 3
