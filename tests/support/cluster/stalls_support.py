"""Helpers of the tests of stalls, which other tests use as well."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from sm_train.entrypoints.job_interface.checkpoint_layout import MARKER, CheckpointMarker
from sm_train.toolkit.records.job_logs import parse_event

from tests.support.cluster.training_jobs import free_port, priced_document
from tests.support.deadline import DEADLINE

STALL_TIMEOUT = 1
"""Seconds."""


MAX_TIMEOUT = 30
"""Seconds; the limit until a watchdog has seen enough steps."""


def heartbeat_config(on_stall: str) -> dict[str, Any]:
    return {
        "min_timeout": STALL_TIMEOUT,
        "max_timeout": MAX_TIMEOUT,
        "on_stall": on_stall,
        "interval": 1,
    }


def fill(pipe: int) -> None:
    """Fill a pipe, so that the next write blocks until something is read."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 1024)
    os.set_blocking(pipe, True)


@dataclass(frozen=True)
class Host:
    """Where one process runs; ``command`` is put in front of its own."""

    base: Path
    command: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


class WatchedJob:
    """Processes that train nothing, and their output; all on one node unless ``hosts`` is given."""

    def __init__(
        self,
        base: Path,
        faults: list[str],
        on_stall: str,
        variables: dict[str, str] | None = None,
        hosts: list[Host] | None = None,
        *,
        full_output: bool = False,
    ) -> None:
        self.base = base
        document = priced_document()
        document["8px"]["heartbeat"] = heartbeat_config(on_stall)
        base.mkdir(exist_ok=True)
        (base / "job.json").write_text(json.dumps(document))
        (base / "checkpoints" / "step-00000040").mkdir(parents=True)
        marker = CheckpointMarker(40, 1, "same", ()).to_json()
        (base / "checkpoints" / "step-00000040" / MARKER).write_text(marker)
        read, write = os.pipe()
        if full_output:
            fill(write)
        launch = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_RESTART_COUNT": "0"}
        launch |= variables or {}
        name = f"{launch['MASTER_PORT']}-0-{launch['TORCHELASTIC_RESTART_COUNT']}"
        self.heartbeats = Path(f"/dev/shm/sm-train-{os.getuid()}-{os.getpid()}-{name}")
        self.processes = []
        for rank, fault in enumerate(faults):
            host = hosts[rank] if hosts else Host(base)
            environment = {
                **os.environ,
                "SAGEMAKER_BASE_DIR": str(host.base),
                "MASTER_ADDR": "127.0.0.1",
                "WORLD_SIZE": str(len(faults)),
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": "0" if hosts else str(rank),
                "LOCAL_WORLD_SIZE": "1" if hosts else str(len(faults)),
                **launch,
                **host.variables,
            }
            command = [*host.command, sys.executable, "-m", "tests.support.cluster.faulty_process"]
            command += [str(base / "job.json"), fault]
            self.processes.append(
                subprocess.Popen(command, env=environment, stdout=write, stderr=write)
            )
        os.close(write)
        self._output = os.fdopen(read, errors="replace")
        self.text = ""
        self._watchdog = threading.Timer(DEADLINE, self._end)
        self._watchdog.start()

    def __enter__(self) -> WatchedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._end()
        self._output.close()

    def _end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()

    def lines(self) -> Iterator[str]:
        for line in self._output:
            self.text += line
            yield line

    def wait_for(self, **fields: Any) -> dict[str, Any]:
        for line in self.lines():
            event = parse_event(line)
            if event and fields.items() <= event.items():
                return event
        raise AssertionError(f"no {fields} in:\n{self.text}")

    def wait_until_learned(self, nodes: int = 1) -> None:
        """Wait until every node's watchdog has learned the timeout of a step."""
        learned = set()
        for line in self.lines():
            event = parse_event(line)
            if event and event["kind"] == "heartbeat" and event["limit_seconds"] < MAX_TIMEOUT:
                learned.add(event["node"])
            if len(learned) == nodes:
                return

    def report_text(self, event: dict[str, Any], suffix: str) -> str:
        """Return the contents of the event's files with this suffix."""
        folder = self.base / "checkpoints" / event["evidence"]
        return "\n".join(
            (folder / name).read_text() for name in event["files"] if name.endswith(suffix)
        )
