"""Runs one stage in containers through the SDK's local mode, and removes them afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from sm_train.entrypoints.job_interface.index_location import removal_variables
from sm_train.estimators.bundle.bundle import LAUNCHER, Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.launch_plan import launch_plan
from sm_train.estimators.request.training_request import training_request
from sm_train.estimators.sdk.local_trainer import LocalJob
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.submit.local import docker
from sm_train.toolkit.submit.local.container_folders import CHECKPOINTS, PREPARE, ContainerFolders
from sm_train.toolkit.submit.local.processes import (
    GRACE_SECONDS,
    LAST_LINES,
    NodeFailure,
    read_failure,
)

_IMAGE = "sm-train-local"


def build_command() -> str:
    """Return the command that builds the default image."""
    dockerfile = files("sm_train.toolkit") / "templates" / "local-image.Dockerfile"
    return f"docker build -t {_IMAGE} -f {dockerfile} {files('sm_train.estimators') / 'data'}"


class LocalContainers:
    """One stage's containers; leaving the context removes its containers and the network."""

    def __init__(
        self,
        folders: ContainerFolders,
        config: RunConfig,
        stage: StageSection,
        bundle: Bundle,
        *,
        image: str,
        processes: int,
    ) -> None:
        self._folders = folders.local
        self._project = _project(folders.local.root)
        docker.remove_project(self._project)  # left by a run that was killed
        nodes = len(folders.local.nodes)
        # SMDDP does not run on this machine's CPU, and its request has no entrypoint.
        without_smddp = config.cluster.model_copy(update={"backend": "nccl"})
        local_config = config.model_copy(update={"cluster": without_smddp})
        job = LocalJob(
            request=training_request(
                local_config,
                stage,
                launch_plan(local_config, stage, image),
                bundle,
                region=config.region or "local",
                staged="s3://not-staged/local",
            ),
            nodes=nodes,
            processes=processes,
            channels={name: str(path.absolute()) for name, path in folders.channels.items()},
            environment={
                "BASH_ENV": PREPARE,
                # Lists of removed samples are in the channels, which are folders of this machine.
                **dict.fromkeys(removal_variables(config.removal_lists), ""),
                "ACCELERATE_USE_CPU": "true",
                # The SDK's local mode sets an interface that docker's containers do not have.
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (nodes * processes))),
            },
            bundle=str(folders.local.bundle),
            entry=bundle.entry,
            root=str(folders.sdk),
            writable=(CHECKPOINTS,),
        )
        description = folders.local.root / "containers.json"
        job.write(description)
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._rest = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sm_train.estimators.sdk.local_trainer", str(description)],
            env=os.environ | {"COMPOSE_PROJECT_NAME": self._project, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def __enter__(self) -> LocalContainers:
        return self

    def __exit__(self, *_: object) -> None:
        docker.remove_project(self._project)
        was_running = self._process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            # With docker compose, which would create more containers.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        docker.remove_project(self._project)
        if was_running:
            docker.remove_created_later(self._project)

    def lines(self) -> Iterator[str]:
        """Yield the containers' output as it arrives, until all have exited or one has failed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line.rstrip("\n"))
            yield line
        self._process.wait()

    def remaining_lines(self) -> Iterator[str]:
        """Yield what the containers printed while they were being ended."""
        return iter(self._rest.splitlines(keepends=True))

    def failure(self) -> NodeFailure | None:
        """Return the container that failed first; the others lost their peer or were stopped.

        Raises:
            UserError: docker compose failed before it created a container.
        """
        hosts = [node.base.name for node in self._folders.nodes]
        containers = sorted(
            docker.containers(self._project), key=lambda container: container.finished
        )
        failed = [
            container for container in containers if container.exit_code and not container.running
        ]
        if not failed:
            if self._process.returncode == 0 or len(containers) == len(hosts):
                return None
            raise UserError(
                "\n  ".join(["docker compose failed:", *self._last_lines]), ExitCode.JOB_FAILED
            )
        first = failed[0]
        node = hosts.index(first.host)
        return NodeFailure(
            node,
            first.exit_code,
            read_failure(self._folders.nodes[node]),
            docker.last_lines(first, LAST_LINES),
        )

    def end(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Send SIGTERM, so that every process checkpoints and exits; then remove all containers."""
        # Before the launcher runs there is no training to checkpoint.
        signaled = [
            docker.terminate(container)
            for container in docker.containers(self._project)
            if container.running and docker.runs(container, LAUNCHER)
        ]
        if any(signaled):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._rest, _ = self._process.communicate(timeout=grace_seconds)
        docker.remove_project(self._project)


def _project(root: Path) -> str:
    """Return the name of the docker compose project of a stage's folder."""
    return f"sm-train-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"
