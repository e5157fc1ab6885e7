"""Runs each ``sm-train`` command in its own process without repeating the imports.

Each test process has one fork server that has imported what the commands use (the SageMaker SDK
alone takes seconds) and forks for each command. The tests of lazy imports start a new interpreter
instead.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

import pytest

PRELOADED = (
    "tests.support.forked_commands.cli_server",
    "tests.support.forked_commands.cli_preload",
    "boto3",
    "jinja2",
    "sagemaker.core.helper.session_helper",
    "sagemaker.core.network",
    "sagemaker.core.processing",
    "sagemaker.core.training.configs",
    "sagemaker.train.model_trainer",
)

_START_LOCK = threading.Lock()


def run(
    prelude: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdin: str,
    timeout: float,
    terminal: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Execute ``prelude`` and ``sm-train arguments``; return the same as :func:`subprocess.run`.

    All streams are the device ``terminal``, if it is given; then nothing is captured.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin, encoding="utf-8")
        if terminal is not None:
            files = [Path(terminal)] * 3
        with _START_LOCK:
            process = _context().Process(
                target=_become_command, args=(prelude, list(arguments), dict(env), cwd, files)
            )
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        if terminal is not None:
            return subprocess.CompletedProcess(list(arguments), process.exitcode)
        output, errors = (path.read_text(encoding="utf-8") for path in files[1:])
        return subprocess.CompletedProcess(list(arguments), process.exitcode, output, errors)


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    """Start the fork server once, without AWS credentials or a home folder; return its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("HOME", os.devnull)
        forkserver.ensure_running()
    return context


def _become_command(
    prelude: str, arguments: list[str], env: dict[str, str], cwd: Path, files: list[Path]
) -> None:
    """Run the command in the forked process, with its streams, environment and folder.

    ``files`` are the paths for standard input, output and error.
    """
    for descriptor, path in enumerate(files):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT
        file = os.open(path, flags | os.O_NOCTTY)
        os.dup2(file, descriptor)
        os.close(file)
    # The fork inherits Python's stream objects of the server: replace them by new ones on the
    # command's descriptors.
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)), "utf-8")
        for descriptor in (1, 2)
    )
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    sys.path.insert(0, "")
    code = 1
    try:
        exec(prelude, {})
        import_module("sm_train.toolkit.cli").main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    # os._exit skips exit handlers and flushing; a normal exit would run pytest's as well.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
