"""Runs one stage's processes on this machine through ``accelerate launch``, and ends them all.

Each emulated node has its own launcher, as on SageMaker; the launchers rendezvous on loopback.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil
from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths
from sm_train.entrypoints.job_interface.index_location import removal_variables
from sm_train.entrypoints.job_interface.job_config import BUNDLE_VARIABLE
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.submit.local.folders import LocalFolders
from sm_train.toolkit.submit.local.read_only import read_only_command

LAST_LINES = 20
GRACE_SECONDS = 60.0
"""Time for a job to checkpoint and exit after SIGTERM; SageMaker allows 120 seconds."""


_LAST_OUTPUT_SECONDS = 10.0
"""Time for a pipe to close once its processes have ended."""


@dataclass
class _Node:
    process: subprocess.Popen[str]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


@dataclass(frozen=True)
class NodeFailure:
    """The node that failed first; ``failure`` is the content of its failure file, or empty."""

    node: int
    exit_code: int
    failure: str
    last_lines: tuple[str, ...]


class LocalProcesses:
    """The running launchers of one stage; leaving the context ends all processes."""

    def __init__(
        self,
        folders: LocalFolders,
        stage: StageSection,
        *,
        processes: int,
        cpu: bool,
        options: Sequence[str] = (),
    ) -> None:
        self._folders = folders
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        port, read_only = _free_port(), read_only_command(folders.inputs)
        self._nodes = [
            _Node(
                _launch(
                    folders,
                    stage,
                    rank,
                    processes=processes,
                    cpu=cpu,
                    port=port,
                    options=options,
                    prefix=read_only,
                )
            )
            for rank in range(len(folders.nodes))
        ]
        self._readers = [
            threading.Thread(target=self._read, args=(rank, node), daemon=True)
            for rank, node in enumerate(self._nodes)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(grace_seconds=0.0)

    def _read(self, rank: int, node: _Node) -> None:
        assert node.process.stdout is not None
        for line in node.process.stdout:
            node.last_lines.append(line.rstrip("\n"))
            self._lines.put((rank, line))
        self._lines.put((rank, None))

    def lines(self) -> Iterator[str]:
        """Yield the nodes' output as it arrives, until all have exited or one has failed."""
        running = set(range(len(self._nodes)))
        while running:
            rank, line = self._lines.get()
            if line is not None:
                yield line
                continue
            running.discard(rank)
            if self._nodes[rank].process.wait() != 0:
                return

    def remaining_lines(self) -> Iterator[str]:
        """Yield what the nodes printed while they were being ended."""
        for reader in self._readers:
            reader.join(_LAST_OUTPUT_SECONDS)
        with contextlib.suppress(queue.Empty):
            while True:
                _, line = self._lines.get_nowait()
                if line is not None:
                    yield line

    def failure(self) -> NodeFailure | None:
        """Return the node that failed first; None if all succeeded.

        When a node dies the others lose their peer and fail, too. Only the node that failed first
        has a failure file.
        """
        failed = []
        for rank, node in enumerate(self._nodes):
            code = node.process.poll()
            text = read_failure(self._folders.nodes[rank])
            if code not in (None, 0) or text:
                failed.append(NodeFailure(rank, code or 1, text, tuple(node.last_lines)))
        with_file = [failure for failure in failed if failure.failure]
        return next(iter(with_file + failed), None)

    def end(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Send SIGTERM, so that every process checkpoints and exits; then kill what remains."""
        # Collected before the launchers exit: their orphans could not be found any more.
        trees = [_process_tree(node.process.pid) for node in self._nodes]
        for node in self._nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        processes = [process for tree in trees for process in tree]
        _, alive = psutil.wait_procs(processes, timeout=grace_seconds)
        # Include children started since then; a launcher that has exited starts no more.
        alive += [child for process in alive for child in _process_tree(process.pid)]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=10)


def _process_tree(pid: int) -> list[psutil.Process]:
    try:
        launcher = psutil.Process(pid)
        return [*launcher.children(recursive=True), launcher]
    except psutil.NoSuchProcess:
        return []


def _launch(
    folders: LocalFolders,
    stage: StageSection,
    rank: int,
    *,
    processes: int,
    cpu: bool,
    port: int,
    options: Sequence[str],
    prefix: Sequence[str],
) -> subprocess.Popen[str]:
    nodes = len(folders.nodes)
    world_size = nodes * processes
    command = [*prefix, sys.executable, "-m", "accelerate.commands.launch"]
    if world_size > 1:
        # Despite its name the flag selects the launcher for several processes on any device:
        # with --cpu alone accelerate starts one process and expects mpirun to start the rest.
        command += ["--multi_gpu", "--same_network", "--main_process_ip", "127.0.0.1"]
        command += ["--main_process_port", str(port)]
    elif cpu:
        command += ["--cpu"]
    command += ["--num_machines", str(nodes), "--machine_rank", str(rank)]
    command += ["--num_processes", str(world_size)]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [folders.entry, "--stage", stage.name, *options]
    return subprocess.Popen(
        command,
        cwd=folders.bundle,
        env=_environment(folders.nodes[rank], folders.removal_lists, cpu=cpu, world_size=world_size)
        | {BUNDLE_VARIABLE: folders.bundle_sha256},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # A terminal's Ctrl-C must reach only this process, which then terminates the children.
        start_new_session=True,
    )


def _environment(
    node: SageMakerPaths, lists: dict[str, str], *, cpu: bool, world_size: int
) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world_size)
    environment = {
        **os.environ,
        "SAGEMAKER_BASE_DIR": str(node.base),
        "SM_MODEL_DIR": str(node.model),
        "SM_OUTPUT_DATA_DIR": str(node.output_data),
        "SM_CHANNEL_TRAIN": str(node.channel("train")),
        "SM_CURRENT_HOST": node.base.name,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        **removal_variables(lists),
    }
    if cpu:
        environment |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def read_failure(node: SageMakerPaths) -> str:
    return node.failure.read_text(errors="replace").strip() if node.failure.exists() else ""
