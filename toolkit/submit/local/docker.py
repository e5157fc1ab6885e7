"""Calls docker's command line, which the SDK uses as well, for what the SDK does not do."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass

from sm_train.toolkit.base.errors import ExitCode, UserError

NETWORK = "sagemaker-local"
"""The SDK's name for its containers' network, which all local jobs share (sagemaker 3.27)."""

_CREATION_SECONDS = 2.0
"""More than the engine takes to create a container: 0.8 s on two busy cores (2026-11)."""

_ALTERNATIVE = "or use --local process"


@dataclass(frozen=True)
class Container:
    """The container of one node.

    ``finished`` is an ISO 8601 time, empty while it runs; ``exit_code`` is 0 until then.
    """

    id: str
    host: str
    running: bool
    exit_code: int
    finished: str


def require_docker(image: str, build: str) -> None:
    """Check that a job can start; ``build`` is the command that builds the image.

    Raises:
        UserError: no engine, no compose, no such image, or the SDK's network is in use.
    """
    problem = _problem(image, build)
    if problem is not None:
        raise UserError(problem, ExitCode.PREFLIGHT)


def _problem(image: str, build: str) -> str | None:
    if not shutil.which("docker"):
        return f"docker: not installed; install it, {_ALTERNATIVE}"
    if _docker("version", "--format", "{{.Server.Version}}").returncode:
        return f"docker: the engine does not respond; start it, {_ALTERNATIVE}"
    if _docker("compose", "version").returncode and not shutil.which("docker-compose"):
        return f"docker compose: not installed; install it, {_ALTERNATIVE}"
    if _docker("image", "inspect", image).returncode:
        return f"--image: {image}: no such image on this machine; run {build}"
    attached = "{{range .Containers}}{{.Name}} {{end}}"
    names = _docker("network", "inspect", NETWORK, "--format", attached).stdout.split()
    if names:
        return (
            f"docker: another local job is running ({', '.join(names)}), and the SDK has one "
            f"network for all; wait for it, or run docker rm -f {' '.join(names)}"
        )
    return None


def containers(project: str) -> list[Container]:
    """Return the containers of a compose project, including exited ones."""
    ids = _docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={project}").stdout
    if not ids.split():
        return []
    return [
        Container(
            id=document["Id"],
            host=document["Config"]["Labels"]["com.docker.compose.service"],
            running=document["State"]["Running"],
            exit_code=document["State"]["ExitCode"],
            finished="" if document["State"]["Running"] else document["State"]["FinishedAt"],
        )
        for document in json.loads(_docker("inspect", *ids.split()).stdout or "[]")
    ]


def remove_project(project: str) -> None:
    """Remove a project's containers, running or not, and the SDK's network if it is unused."""
    ids = [container.id for container in containers(project)]
    if ids:
        _docker("rm", "-f", "-v", *ids)
    _docker("network", "rm", NETWORK)


def remove_created_later(project: str) -> None:
    """Remove what the engine still creates for a project whose docker compose was killed.

    The engine completes a creation that was requested, also without the client.
    """
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < _CREATION_SECONDS:
        if containers(project):
            remove_project(project)
            quiet_since = time.monotonic()
        time.sleep(0.2)


def last_lines(container: Container, count: int) -> tuple[str, ...]:
    """Return the last lines of a container's output."""
    logs = _docker("logs", "--tail", str(count), container.id)
    return tuple((logs.stdout + logs.stderr).splitlines())


def runs(container: Container, module: str) -> bool:
    """Return whether a process of the container runs the Python module."""
    # The pattern must not match its own command line.
    pattern = f"[{module[0]}]{module[1:]}"
    search = f"grep -qs '{pattern}' /proc/[0-9]*/cmdline"
    return _docker("exec", container.id, "sh", "-c", search).returncode == 0


def terminate(container: Container) -> bool:
    """Send SIGTERM; return whether the container was still running."""
    return _docker("kill", "--signal", "TERM", container.id).returncode == 0


def _docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
