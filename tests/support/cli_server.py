"""Runs ``sm-train`` in a process of its own that need not import everything anew.

A server of each test process has imported what the commands use (the SageMaker SDK alone takes
seconds) and forks for each command. That commands import little is tested with fresh interpreters.
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
    "tests.support.cli_server",
    "boto3",
    "jinja2",
    "sagemaker.core.helper.session_helper",
    "sagemaker.core.network",
    "sagemaker.core.processing",
    "sagemaker.core.training.configs",
    "sagemaker.train.model_trainer",
)

_STARTING = threading.Lock()


def run(
    prelude: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdin: str,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """What :func:`subprocess.run` of ``sm-train arguments`` gives, after ``prelude``'s code."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin, encoding="utf-8")
        with _STARTING:
            process = _context().Process(
                target=_command, args=(prelude, list(arguments), dict(env), cwd, files)
            )
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        output, errors = (path.read_text(encoding="utf-8") for path in files[1:])
        return subprocess.CompletedProcess(list(arguments), process.exitcode, output, errors)


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    """With the server running, started once; it has no credentials and nobody's home."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("HOME", os.devnull)
        forkserver.ensure_running()
    return context


def _command(
    prelude: str, arguments: list[str], env: dict[str, str], cwd: Path, files: list[Path]
) -> None:
    """In the forked process: become the command."""
    for number, path in enumerate(files):
        file = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), "utf-8")
        for number in (1, 2)
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
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
