"""Installs the packages of the user code, once in each Python environment.

The packages of sm-train are installed before, with hashes. pip then rejects every package without
one, so the user's own are installed separately. A user's version of a package wins.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import site
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from sm_train.entrypoints.packages.pip_install import PackageInstallError, pip_install

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
