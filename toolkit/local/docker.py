"""What is asked of docker beside the SDK, by its command line, which the SDK uses as well."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass

from sm_train.toolkit.errors import ExitCode, UserError

NETWORK = "sagemaker-local"
"""The SDK's name for the network of its containers, one for all (sagemaker 3.27)."""

_INSTEAD = "or use --local process"


@dataclass(frozen=True)
class Container:
    """One host of a job; ``finished`` is empty or a time that sorts, ``exit_code`` 0 till then."""

    id: str
    host: str
    running: bool
    exit_code: int
    finished: str


def require_docker(image: str, build: str) -> None:
    """See to it that a job can start at all; ``build`` is the command that makes the image.

    Raises:
        UserError: no engine, no compose, no such image, or the SDK's network is taken.
    """
    problem = _problem(image, build)
    if problem is not None:
        raise UserError(problem, ExitCode.PREFLIGHT)


def _problem(image: str, build: str) -> str | None:
    if not shutil.which("docker"):
        return f"docker: not installed; install it, {_INSTEAD}"
    if _docker("version", "--format", "{{.Server.Version}}").returncode:
        return f"docker: no engine answers; start it, {_INSTEAD}"
    if _docker("compose", "version").returncode and not shutil.which("docker-compose"):
        return f"docker compose: not installed; install it, {_INSTEAD}"
    if _docker("image", "inspect", image).returncode:
        return f"--image: {image}: no such image here; {build}"
    attached = "{{range .Containers}}{{.Name}} {{end}}"
    names = _docker("network", "inspect", NETWORK, "--format", attached).stdout.split()
    if names:
        return (
            f"docker: another local job runs ({', '.join(names)}), and the SDK has one network "
            f"for all; wait for it, or docker rm -f {' '.join(names)}"
        )
    return None


def containers(project: str) -> list[Container]:
    """The containers of a compose project, ended ones too."""
    ids = _docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={project}").stdout
    if not ids.split():
        return []
    return [
        Container(
            id=one["Id"],
            host=one["Config"]["Labels"]["com.docker.compose.service"],
            running=one["State"]["Running"],
            exit_code=one["State"]["ExitCode"],
            finished="" if one["State"]["Running"] else one["State"]["FinishedAt"],
        )
        for one in json.loads(_docker("inspect", *ids.split()).stdout or "[]")
    ]


def remove_project(project: str) -> None:
    """Remove a project's containers, running or not, and the SDK's network if it is free."""
    ids = [one.id for one in containers(project)]
    if ids:
        _docker("rm", "-f", "-v", *ids)
    _docker("network", "rm", NETWORK)


def last_lines(container: Container, count: int) -> tuple[str, ...]:
    """The last that a container said."""
    said = _docker("logs", "--tail", str(count), container.id)
    return tuple((said.stdout + said.stderr).splitlines())


def first_process_is(container: Container, name: str) -> bool:
    """Whether ``name`` is in the command line of the process that gets the container's signals."""
    return _docker("exec", container.id, "grep", "-q", name, "/proc/1/cmdline").returncode == 0


def terminate(container: Container) -> bool:
    """Send SIGTERM; whether the container was still there."""
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
