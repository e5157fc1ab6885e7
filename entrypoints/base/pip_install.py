"""Runs pip in a job: with the run file's package index, and without a second one.

``cluster.package_index`` reaches the job as :data:`PIP_INDEX` or :data:`CODEARTIFACT`. The SDK's
start script (sagemaker 3.27) and AWS's container toolkit read the latter, too, but show its token
in the log if pip fails. Nothing here needs a package that pip has yet to install but boto3, which
AWS's images contain.

The packages of the user code are installed once in each Python environment, after those of
sm-train. These have hashes, with which pip rejects every package without one, so the user's own are
installed separately. A user's version of a package wins.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import re
import site
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from sm_train.entrypoints.base.sagemaker_paths import SageMakerPaths

NAME = "sm-train"


def install_command(extra: str) -> str:
    """Return ``pip install "…[extra]"`` for the folder, wheel or repository that pip installed.

    pip records it in ``direct_url.json`` (Python Packaging User Guide, Recording the Direct URL
    Origin of installed distributions, 2026-11). Without that record the package is named.
    """
    return f"pip install {_form().format(extra=extra)}"


@cache
def _form() -> str:
    """Return pip's arguments, with ``{extra}`` for the extra's name."""
    # Imported for a message only: they take half as long as `sm-train --help` as a whole.
    from importlib.metadata import distributions
    from urllib.parse import unquote, urlsplit

    # A clone has metadata of its own, without the record, which is found first in its folder.
    texts = (found.read_text("direct_url.json") for found in distributions(name=NAME))
    try:
        recorded: dict[str, Any] = json.loads(next(filter(None, texts), "{}"))
    except ValueError:
        recorded = {}
    url = recorded.get("url", "")
    escaped = url.replace("{", "{{").replace("}", "}}")
    if "vcs_info" in recorded:
        vcs = recorded["vcs_info"]
        revision = vcs.get("requested_revision") or vcs.get("commit_id", "")
        return f'"{NAME}[{{extra}}] @ {vcs["vcs"]}+{escaped}@{revision}"'
    if not url:
        return f'"{NAME}[{{extra}}]"'
    if not url.startswith("file:"):
        return f'"{NAME}[{{extra}}] @ {escaped}"'
    path = unquote(urlsplit(url).path).replace("{", "{{").replace("}", "}}")
    editable = "-e " if recorded.get("dir_info", {}).get("editable") else ""
    return f'{editable}"{path}[{{extra}}]"'


JOB_REQUIREMENTS = "requirements.txt"
"""File of the bundle with the pinned packages of sm-train."""

PIP_INDEX = "PIP_INDEX_URL"
CODEARTIFACT = "CA_REPOSITORY_ARN"

_REPOSITORY = re.compile(
    r"arn:[^:]+:codeartifact:(?P<region>[^:]+):(?P<owner>\d{12}):"
    r"repository/(?P<domain>[^/]+)/(?P<repository>[^/]+)"
)


class PackageInstallError(RuntimeError):
    """pip could not install the packages; its own output is in the log."""


def pip_install(*arguments: str, requirements: Path) -> None:
    """Install ``requirements`` by pip with further ``arguments``.

    Raises:
        PackageInstallError: the package index cannot be reached, or pip failed.
    """
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    command += [*arguments, "-r", requirements.name]
    # The token of an index is not an argument, which every user of the machine can read.
    environment = os.environ | index_variables(os.environ)
    done = subprocess.run(
        command,
        cwd=requirements.parent,
        env=environment,
        check=False,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("ERROR: ")
        reason = f": {last}" if last else ""
        raise PackageInstallError(
            f"pip install -r {requirements.name} failed with exit code {done.returncode}{reason}"
        )


def install_job_packages(bundle: Path, others: Sequence[str] = ()) -> None:
    """Install the bundle's pinned packages, and those of its requirement files ``others``.

    Raises:
        PackageInstallError: the package index cannot be reached, or pip failed.
    """
    for name in (JOB_REQUIREMENTS, *others):
        if (bundle / name).exists():
            pip_install("--require-hashes", requirements=bundle / name)


def index_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make pip use the run's CodeArtifact repository, if it has one.

    Raises:
        PackageInstallError: CodeArtifact gives no token, or boto3 is missing.
    """
    arn = environment.get(CODEARTIFACT)
    if not arn:
        return {}
    match = _REPOSITORY.fullmatch(arn)
    if match is None:
        raise PackageInstallError(f"{CODEARTIFACT}: {arn} is not the ARN of a repository")
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise PackageInstallError(f"{arn}: the image needs boto3 to log in") from None
    domain, owner = match["domain"], match["owner"]
    client = boto3.client("codeartifact", region_name=match["region"])
    try:
        token = client.get_authorization_token(domain=domain, domainOwner=owner)
        endpoint = client.get_repository_endpoint(
            domain=domain, domainOwner=owner, repository=match["repository"], format="pypi"
        )
    except (BotoCoreError, ClientError) as error:
        raise PackageInstallError(f"{arn}: {error}") from None
    scheme, _, address = endpoint["repositoryEndpoint"].rstrip("/").partition("://")
    return {PIP_INDEX: f"{scheme}://aws:{token['authorizationToken']}@{address}/simple/"}


if __name__ == "__main__":
    try:
        install_job_packages(Path.cwd(), sys.argv[1:])
    except PackageInstallError as error:
        paths = SageMakerPaths.from_environment()
        if paths.input_config.exists():  # a training job, which has a failure reason
            paths.write_failure(f"{error}\n")
        sys.exit(f"error: {error}")


USER_REQUIREMENTS = "requirements-user.txt"
"""File of the bundle with the lines of the user's requirements.txt."""

_BUNDLE = Path(__file__).parents[3]


def install_user_packages(bundle: Path = _BUNDLE) -> None:
    """Install the user's packages into this environment, unless another process did.

    Raises:
        PackageInstallError: pip failed.
    """
    requirements = bundle / USER_REQUIREMENTS
    if not requirements.exists():
        return
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]
    with _open_marker(f"sm-train-packages-{digest}") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        # The position of `marker` is that of its opening, before the wait for the lock.
        if os.fstat(marker.fileno()).st_size:
            return
        try:
            pip_install(requirements=requirements)
        except PackageInstallError as error:
            raise PackageInstallError(
                f"{error}; correct requirements.txt in the folder of code:"
            ) from None
        marker.write("installed\n")


def _open_marker(name: str) -> IO[str]:
    """Open a file in the folder that pip installs packages to.

    There it lives and dies with the packages: the next container on the node, another environment
    and another user find theirs missing.

    Raises:
        PackageInstallError: neither the environment nor the user's own packages can be written to.
    """
    folder = Path(os.environ.get("PIP_TARGET") or sysconfig.get_path("purelib"))
    if folder.exists() and not os.access(folder, os.W_OK):  # then pip installs for the user
        folder = Path(site.getusersitepackages())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / name).open("a+")
    except OSError as error:
        raise PackageInstallError(
            f"{USER_REQUIREMENTS} cannot be installed: {folder}: {error.strerror}; use an image "
            "whose Python environment the job's user can write to"
        ) from None


def install_under_mpi(environment: Mapping[str, str] = os.environ) -> None:
    """Install the user's packages in a rank that MPI started.

    On the other route, the launcher does so before it starts the ranks. AWS's toolkit starts the
    ranks of the SMDDP route, and it installs the bundle's requirements.txt only.
    """
    if "OMPI_COMM_WORLD_RANK" in environment:
        install_user_packages()
        importlib.invalidate_caches()
