"""Runs the commands of a manifest on this machine: those of sbatch and kubectl."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence

from sm_train.estimators.manifests.manifest import Manifest
from sm_train.toolkit.base.errors import ExitCode, UserError

_SECONDS = 120.0

_REASON = 400
"""Characters of what a program says about its failure, the last ones."""


def has_scheduler(manifest: Manifest) -> bool:
    """Return whether this machine has the program that starts the manifest's job."""
    return shutil.which(manifest.program) is not None


def require_scheduler(manifest: Manifest) -> None:
    """Refuse to start a job where its program is missing.

    Raises:
        UserError: it is.
    """
    if not has_scheduler(manifest):
        raise UserError(
            f"--to {manifest.target}: {manifest.program} is not on this machine; "
            f"`sm-train manifest RUN --to {manifest.target} --stage-code` prints the commands for "
            "one that has it"
        )


def run_command(command: str) -> str:
    """Run a command line of a manifest that was built here; return its output.

    Raises:
        UserError: it fails; the message is what it says.
    """
    return _run(["bash", "-c", f"set -o pipefail; {command}"], command)


def run_words(words: Sequence[str]) -> str:
    """Run a program with its arguments, without a shell; see :func:`run_command`."""
    return _run(words, shlex.join(words))


def _run(words: Sequence[str], command: str) -> str:
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"{command}: {words[0]} is not on this machine") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command}: no answer within {_SECONDS:.0f} s", ExitCode.UNEXPECTED
        ) from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
        # sbatch's last line is often advice only.
        reason = "; ".join(line for line in lines if line and not line.startswith("Try "))
        raise UserError(f"{command}: {reason[-_REASON:] or f'exit code {done.returncode}'}")
    return done.stdout.strip()
