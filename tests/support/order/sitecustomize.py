"""Records the calls of a process that decide what a crash leaves, in order; may end the process.

Python imports this module at start-up of every process whose PYTHONPATH begins with its folder, so
worker processes are recorded too. Each call is really made. ``ORDER_TRACE`` is the file of
records, one JSON list ``[call, path or key, ...]`` per line. ``ORDER_KILL_AT`` is the number of the
call before which the whole process group is killed, as by a power cut, and ``ORDER_FAIL_AT`` that
of a call which fails as on a broken disk: without the name of a file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

_TRACE = os.environ.get("ORDER_TRACE")
_KILL_AT = int(os.environ.get("ORDER_KILL_AT", "0"))
_FAIL_AT = int(os.environ.get("ORDER_FAIL_AT", "0"))
_SESSION = "botocore.httpsession"


def _record(call: str, *arguments: object) -> None:
    descriptor = os.open(str(_TRACE), os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        number = os.pread(descriptor, size, 0).count(b"\n") + 1
        if number == _KILL_AT:
            os.killpg(0, signal.SIGKILL)
        os.write(descriptor, (json.dumps([call, *arguments]) + "\n").encode())
        if number == _FAIL_AT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    finally:
        os.close(descriptor)


def _path(path: Any, folder: int | None = None) -> str:
    """Return the absolute path of an argument; ``folder`` is a descriptor it may be relative to."""
    base = Path.cwd() if folder is None else _of_descriptor(folder)
    return str(base / os.fsdecode(path))


def _of_descriptor(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _state(path: str | Path) -> list[int] | None:
    """Return what changes when a file is written; None for a folder."""
    if Path(path).is_dir():
        return None
    status = Path(path).stat(follow_symlinks=False)
    return [status.st_mtime_ns, status.st_size]


def _wrap_os() -> None:
    def flush(name: str) -> None:
        original = getattr(os, name)

        def flushing(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            path = _of_descriptor(number)
            _record("flush", str(path), _state(path))
            original(descriptor)

        setattr(os, name, flushing)

    def rename(name: str) -> None:
        original = getattr(os, name)

        def renaming(source: Any, target: Any, **options: Any) -> None:
            path = _path(source)
            _record("name", _path(target), path, _state(path))
            original(source, target, **options)

        setattr(os, name, renaming)

    def remove(name: str) -> None:
        original = getattr(os, name)

        def removing(path: Any, *, dir_fd: int | None = None) -> None:
            _record("remove", _path(path, dir_fd))
            original(path, dir_fd=dir_fd)

        setattr(os, name, removing)

    for name in ("fsync", "fdatasync"):
        flush(name)
    for name in ("rename", "replace", "link"):
        rename(name)
    for name in ("unlink", "remove", "rmdir"):
        remove(name)


class _WrapBotocore(MetaPathFinder):
    """Records what botocore sends, once it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _SESSION:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            execute(module)
            original = module.URLLib3Session.send

            def send(session: Any, request: Any) -> Any:
                _record(request.method, request.url.partition("://")[2].partition("/")[2])
                return original(session, request)

            module.URLLib3Session.send = send

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


if _TRACE is not None:
    _wrap_os()
    sys.meta_path.insert(0, _WrapBotocore())
