"""Machines meet before training: real sockets, threads in the machines' places."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sm_train.entrypoints.distributed.rendezvous import (
    MissingNodeError,
    RendezvousAddress,
    join,
    wait_for_nodes,
)
from sm_train.toolkit.jobs.events import parse_event

HOSTS = ("algo-1", "algo-2", "algo-3", "algo-4")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def meet(coming: tuple[str, ...], patience: float) -> dict[str, BaseException | None]:
    """What each machine that comes hears in the end."""
    port = free_port()
    with ThreadPoolExecutor(8) as machines:
        found: dict[str, Future[None]] = {}
        for name in coming:
            found[name] = machines.submit(
                join, name, RendezvousAddress("127.0.0.1", port), patience=patience
            )
        first = machines.submit(wait_for_nodes, HOSTS, port, print, patience=patience, reminder=0.2)
        return {"algo-1": first.exception()} | {n: one.exception() for n, one in found.items()}


def test_when_all_are_there_training_starts() -> None:
    assert meet(HOSTS[1:], 30.0) == dict.fromkeys(HOSTS)


def test_who_does_not_come_is_named_to_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    found = meet(("algo-2", "algo-4"), 3.0)
    assert len(found) == 3
    for error in found.values():
        assert isinstance(error, MissingNodeError)
        assert str(error).startswith("algo-3 did not come")
        assert "security group" in str(error)
        assert "algo-2" not in str(error)
    assert "waiting for algo-3" in capsys.readouterr().out


def test_a_first_machine_out_of_reach_is_named_with_its_port() -> None:
    port = free_port()
    with pytest.raises(MissingNodeError, match=f"127.0.0.1 could not be reached on port {port}"):
        join("algo-2", RendezvousAddress("127.0.0.1", port), patience=0.5)


def test_strangers_and_those_who_say_nothing_are_not_counted() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as machines:
        first = machines.submit(wait_for_nodes, HOSTS[:2], port, print, patience=60.0)
        for words in (b"", b"\xff\xfe\n", b"GET / HTTP/1.1\r\n", b"x" * 100_000):
            stranger = _connected(port)
            stranger.sendall(words)
            stranger.close()
        assert not first.done()
        join("algo-2", RendezvousAddress("127.0.0.1", port), patience=30.0)
        assert first.exception(timeout=30) is None


def _connected(port: int) -> socket.socket:
    """As soon as somebody listens there."""
    for _ in range(600):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            threading.Event().wait(0.05)
    raise AssertionError("nobody listens")


def test_a_machine_that_is_waited_for_in_vain_becomes_the_failure_reason(tmp_path: Path) -> None:
    """The launcher as a job starts it, its patience shortened."""
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    hosts = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}
    (config / "resourceconfig.json").write_text(json.dumps(hosts))
    program = (
        "import sys\nfrom sm_train.entrypoints import launch\n"
        "from sm_train.entrypoints.distributed import rendezvous\n"
        "rendezvous.wait_for_nodes.__kwdefaults__['patience'] = "
        "1.0\nsys.exit(launch.main(['train.py']))"
    )
    environment = {
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SM_MASTER_ADDR": "127.0.0.1",
        "SM_MASTER_PORT": str(free_port() - 1),
        "SM_HOST_COUNT": "2",
        "SM_CURRENT_HOST_RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "output" / "failure").read_text().startswith("algo-2 did not come")
    events = [event for line in done.stdout.splitlines() if (event := parse_event(line))]
    assert [event["code"] for event in events] == ["node-missing"]
    assert "Traceback" not in done.stderr
