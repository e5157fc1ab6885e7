"""Runs one stage in containers through the SDK's local mode, and leaves none behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from sm_train.estimators.bundle.bundle import LAUNCHER, Bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.estimators.request.launcher import launch_plan
from sm_train.estimators.request.training import training_request
from sm_train.estimators.sdk.local_trainer import LocalJob
from sm_train.toolkit.errors import ExitCode, UserError
from sm_train.toolkit.local import docker
from sm_train.toolkit.local.container_folders import PREPARE, ContainerFolders
from sm_train.toolkit.local.processes import GRACE_SECONDS, LAST_LINES, NodeFailure, read_failure

_IMAGE = "sm-train-local"


def build_command() -> str:
    """What makes the command's default image."""
    dockerfile = files("sm_train.toolkit") / "templates" / "local-image.Dockerfile"
    return f"docker build -t {_IMAGE} -f {dockerfile} {files('sm_train.estimators') / 'data'}"


class LocalContainers:
    """One stage's containers; leaving the context leaves no container and no network behind."""

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
        docker.remove_project(self._project)  # of a run that was killed
        nodes = len(folders.local.nodes)
        # On this machine's CPU there is nothing for SMDDP, whose request names no entrypoint.
        plain = config.cluster.model_copy(update={"backend": "nccl"})
        plain_config = config.model_copy(update={"cluster": plain})
        job = LocalJob(
            request=training_request(
                plain_config,
                stage,
                launch_plan(plain_config, stage, image),
                bundle,
                region=config.region or "local",
                staged="s3://nothing/is-staged",
            ),
            nodes=nodes,
            processes=processes,
            channels={name: str(path.absolute()) for name, path in folders.channels.items()},
            environment={
                "BASH_ENV": PREPARE,
                "ACCELERATE_USE_CPU": "true",
                # The SDK's local mode names another one, which docker's containers do not have.
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // (nodes * processes))),
            },
            bundle=str(folders.local.bundle),
            entry=bundle.entry,
            root=str(folders.sdk),
        )
        description = folders.local.root / "containers.json"
        job.write(description)
        self._said: deque[str] = deque(maxlen=LAST_LINES)
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
        self._process.kill()
        self._process.wait()
        docker.remove_project(self._project)  # what was just being made

    def lines(self) -> Iterator[str]:
        """Everything the containers print, as it comes, until all of them, or one, have ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.append(line.rstrip("\n"))
            yield line
        self._process.wait()

    def failure(self) -> NodeFailure | None:
        """The container that ended badly first; the others lost their peer, or were ended.

        Raises:
            UserError: docker compose failed before there was a container.
        """
        hosts = [node.base.name for node in self._folders.nodes]
        ended = sorted(docker.containers(self._project), key=lambda one: one.finished)
        failed = [one for one in ended if one.exit_code and not one.running]
        if not failed:
            if self._process.returncode == 0 or len(ended) == len(hosts):
                return None
            raise UserError(
                "\n  ".join(["docker compose failed:", *self._said]), ExitCode.JOB_FAILED
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
        """Ask every process to checkpoint and leave, then remove what is left."""
        asked = [
            docker.terminate(one)
            for one in docker.containers(self._project)
            if one.running and docker.first_process_is(one, LAUNCHER)
        ]
        if any(asked):  # before that there is nothing to keep
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=grace_seconds)
        docker.remove_project(self._project)


def _project(root: Path) -> str:
    """Docker compose's name for what belongs together: one for each stage's folder."""
    return f"sm-train-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"
