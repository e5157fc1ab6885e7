"""Starts a command that sees some files and folders read-only, as FastFile mounts a channel."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

_SCRIPT = """\
while [ "$1" != -- ]; do
    mount --rbind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 1
    shift
done
shift
exec "$@"
"""

_NAMESPACES = (
    # As root.
    ("--mount",),
    ("--mount", "--user", "--map-current-user", "--keep-caps"),
    # util-linux before 2.38: the command's user is called root, and has the same rights as before.
    ("--mount", "--user", "--map-root-user"),
)


def read_only_command(paths: Iterable[Path]) -> list[str]:
    """Return the start of a command that sees ``paths`` read-only; empty if the system cannot.

    The command gets a mount namespace of its own. Without root, Linux also needs unprivileged user
    namespaces, which some distributions and containers forbid.
    """
    distinct = sorted({str(path.resolve()) for path in paths})
    if shutil.which("unshare") is None:
        return []
    for namespaces in _NAMESPACES:
        command = ["unshare", *namespaces, "sh", "-c", _SCRIPT, "sh", *distinct, "--"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return []
