"""Runs pip in a job: with the run file's package index, and without a second one.

``cluster.package_index`` reaches the job as :data:`PIP_INDEX` or :data:`CODEARTIFACT`. The SDK's
start script (sagemaker 3.27) and AWS's container toolkit read the latter, too, but show its token
in the log if pip fails. Nothing here needs a package that pip has yet to install but boto3, which
AWS's images contain.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm_train.entrypoints.common.sagemaker_paths import SageMakerPaths

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
