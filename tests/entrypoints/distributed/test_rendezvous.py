"""Rendezvous of nodes before training: real stores, with threads in place of nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed  # noqa: F401  importing it later would take time of a node's timeout
from sm_train.entrypoints.base.digests import seal
from sm_train.entrypoints.distributed.messages import ForgedMessageError, MissingNodeError
from sm_train.entrypoints.distributed.rendezvous import (
    RendezvousAddress,
    connect_store,
    join,
    wait_for_nodes,
)
from sm_train.toolkit.records.job_logs import parse_event

from tests.support.cluster.training_jobs import free_port
from tests.support.deadline import DEADLINE

NODES = ("algo-1", "algo-2", "algo-3", "algo-4")


def rendezvous_of(joining: tuple[str, ...], timeout: float) -> dict[str, BaseException | None]:
    """Run the first node and those that join; returns node → its error."""
    address = RendezvousAddress("127.0.0.1", free_port())
    with ThreadPoolExecutor(8) as nodes:
        joins: dict[str, Future[None]] = {
            name: nodes.submit(join, name, address, timeout=timeout) for name in joining
        }
        first = nodes.submit(
            wait_for_nodes, NODES, address.port, print, timeout=timeout, reminder=0.2
        )
        errors = {name: future.exception() for name, future in joins.items()}
        return {"algo-1": first.exception()} | errors


def test_all_nodes_continue_once_all_have_joined() -> None:
    assert rendezvous_of(NODES[1:], 30.0) == dict.fromkeys(NODES)


def test_missing_node_is_named_on_every_node(capsys: pytest.CaptureFixture[str]) -> None:
    errors = rendezvous_of(("algo-2", "algo-4"), 3.0)
    assert len(errors) == 3
    for error in errors.values():
        assert isinstance(error, MissingNodeError)
        assert str(error).startswith("algo-3 did not join")
        assert "security group" in str(error)
        assert "algo-2" not in str(error)
    assert "waiting for algo-3" in capsys.readouterr().out


def test_unreachable_first_node_is_named_with_its_port() -> None:
    port = free_port()
    with pytest.raises(MissingNodeError, match=f"127.0.0.1 could not be reached on port {port}"):
        join("algo-2", RendezvousAddress("127.0.0.1", port), timeout=0.5)


def test_node_may_start_before_the_first_one() -> None:
    address = RendezvousAddress("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as nodes:
        joined = nodes.submit(join, "algo-2", address, timeout=DEADLINE)
        time.sleep(1.5)
        wait_for_nodes(NODES[:2], address.port, print, timeout=DEADLINE)
        assert joined.exception(timeout=DEADLINE) is None


def test_port_is_free_again_after_the_rendezvous() -> None:
    address = RendezvousAddress("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as nodes:
        for _ in range(2):
            joined = nodes.submit(join, "algo-2", address, timeout=DEADLINE)
            wait_for_nodes(NODES[:2], address.port, print, timeout=DEADLINE)
            assert joined.exception(timeout=DEADLINE) is None


def test_foreign_connections_are_not_counted() -> None:
    address = RendezvousAddress("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as nodes:
        first = nodes.submit(wait_for_nodes, NODES[:2], address.port, print, timeout=DEADLINE)
        for data in (b"", b"\xff\xfe\n", b"GET / HTTP/1.1\r\n", b"x" * 100_000):
            connection = connect_when_listening(address.port)
            try:
                connection.sendall(data)
            except ConnectionError:
                pass  # the store closes a connection that does not speak its protocol
            finally:
                connection.close()
        assert not first.done()
        join("algo-2", address, timeout=DEADLINE)
        assert first.exception(timeout=DEADLINE) is None


def test_node_with_another_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs other code, or does not belong to the job."""
    address = RendezvousAddress("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as nodes:
        first = nodes.submit(wait_for_nodes, NODES[:2], address.port, print, timeout=DEADLINE)
        connect_when_listening(address.port).close()
        intruder = connect_store(address, timeout=DEADLINE)
        intruder.set("node/algo-2", seal(b"w", b"another key", "node/algo-2"))
        with pytest.raises(ForgedMessageError, match="node/algo-2"):
            first.result(timeout=DEADLINE)


def connect_when_listening(port: int) -> socket.socket:
    for _ in range(600):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            threading.Event().wait(0.05)
    raise AssertionError(f"nothing listens on port {port}")


def launch(tmp_path: Path, nodes: int) -> subprocess.CompletedProcess[str]:
    """Run the launcher of the first node with a timeout of a second and a stub for torchrun.

    It prints whether torch was imported before torchrun would start.
    """
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    names = list(NODES[:nodes])
    resources = {"current_host": "algo-1", "hosts": names}
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    program = (
        "import sys\nfrom sm_train.entrypoints.launcher import launch\n"
        "from sm_train.entrypoints.distributed import rendezvous\n"
        "rendezvous.wait_for_nodes.__kwdefaults__['timeout'] = 1.0\n"
        "launch.hyperparameters = lambda _: []\n"
        "def torchrun(environment, script):\n"
        "    print('torch imported:', 'torch' in sys.modules, flush=True)\n"
        "    return [sys.executable, '-c', 'pass']\n"
        "launch.torchrun = torchrun\n"
        "sys.exit(launch.main(['train.py']))"
    )
    environment = {
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SM_MASTER_ADDR": "127.0.0.1",
        "SM_MASTER_PORT": str(free_port() - 1),
        "SM_HOST_COUNT": str(nodes),
        "SM_CURRENT_HOST_RANK": "0",
    }
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.integration
def test_missing_node_becomes_the_failure_reason(tmp_path: Path) -> None:
    done = launch(tmp_path, nodes=2)
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "output" / "failure").read_text().startswith("algo-2 did not join")
    events = [event for line in done.stdout.splitlines() if (event := parse_event(line))]
    assert [event["code"] for event in events] == ["node-missing"]
    assert "Traceback" not in done.stderr


def test_launcher_of_a_single_node_imports_no_torch(tmp_path: Path) -> None:
    done = launch(tmp_path, nodes=1)
    assert done.returncode == 0, done.stderr
    assert "torch imported: False" in done.stdout
