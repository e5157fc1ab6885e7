"""Starts Python programs by forking a process that has imported PyTorch and its companions.

Importing torch, accelerate, diffusers and transformers takes five seconds of CPU time, more than
the few training steps of most tests. One server process for each pytest worker imports them once;
every training process, and every torchrun agent, is a fork of it that then runs its script as
``__main__``, with its own environment, folder, session and standard streams. The server imports
third-party code only: ``sm_train`` is imported in the fork, from the bundle under test.

Processes of an image's own Python (``TRAIN_PYTHON``), the SDK's start script, ``accelerate launch``
and the containers do not use the server: those tests start a new interpreter.
"""

from __future__ import annotations

import array
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

IMPORT_TIME_ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Variables that the libraries read while they are imported: every fork has these values."""

PRELOADED = """
numpy pyarrow.parquet blake3 simplejpeg PIL.Image psutil safetensors.torch tenacity
torch torch._dynamo torch.distributed.fsdp torch.distributed.tensor torch.distributed.run
torch.utils.data torch.utils.flop_counter accelerate transformers.models.clip.modeling_clip
transformers.models.clip.tokenization_clip transformers.models.t5.modeling_t5
diffusers.models.autoencoders.autoencoder_kl diffusers.models.unets.unet_2d_condition
diffusers.models.transformers.transformer_sd3 diffusers.models.transformers.pixart_transformer_2d
diffusers.schedulers.scheduling_ddpm diffusers.schedulers.scheduling_ddim
diffusers.schedulers.scheduling_flow_match_euler_discrete diffusers.pipelines.pipeline_utils
""".split()

_HEADER = 8  # bytes: the length of the request that follows


class ForkedProcess:
    """A program that the server started: the part of :class:`subprocess.Popen` that tests use."""

    def __init__(self, pid: int, stdout: IO[str], exit_status: socket.socket) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._exit_status = exit_status

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative for the signal that killed it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            self._exit_status.settimeout(timeout)
            try:
                status = self._exit_status.recv(16)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self.returncode = int(status) if status else -signal.SIGKILL
            self._exit_status.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(1e-3)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> ForkedProcess:
    """Run ``python ARGUMENTS``: a script and its arguments, or ``-m torch.distributed.run …``.

    Standard output and standard error are one pipe, standard input is empty.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(_server())
    read, write = os.pipe()
    request = json.dumps(
        {"arguments": list(arguments), "cwd": str(cwd), "env": {**env, **IMPORT_TIME_ENVIRONMENT}}
    ).encode()
    client.sendmsg(
        [len(request).to_bytes(_HEADER, "big") + request],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))],
    )
    os.close(write)
    pid = int.from_bytes(_receive(client, _HEADER), "big")
    return ForkedProcess(pid, os.fdopen(read, encoding="utf-8", errors="replace"), client)


@cache
def _server() -> str:
    """The address of this process's server, started at the first use; it ends with this process."""
    address = str(Path(tempfile.mkdtemp(prefix="torch-server-")) / "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **IMPORT_TIME_ENVIRONMENT},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n", "the server of forked processes did not start"
    _server_process.append(process)
    return address


_server_process: list[subprocess.Popen[bytes]] = []
"""Keeps the pipe to the server's standard input open: its end is what ends the server."""


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the server of forked processes has ended")
        received += part
    return received


def _serve(address: str) -> None:
    """In the server: fork for each request, and send each client its process's exit code."""
    from importlib import import_module

    for name in PRELOADED:
        import_module(name)
    assert threading.active_count() == 1, "a fork would lack the other threads"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    threading.Thread(target=_exit_with_client, daemon=True).start()
    print("ready", flush=True)
    clients: dict[int, socket.socket] = {}
    listener.settimeout(0.02)
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.setblocking(True)
            pid = _fork(connection, listener, clients)
            clients[pid] = connection
            connection.sendall(pid.to_bytes(_HEADER, "big"))
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            with clients.pop(pid) as client, suppress(OSError):
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _exit_with_client() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _fork(
    connection: socket.socket, listener: socket.socket, clients: Mapping[int, socket.socket]
) -> int:
    data, descriptors, _, _ = socket.recv_fds(connection, _HEADER, 1)
    while len(data) < _HEADER:
        data += _receive(connection, _HEADER - len(data))
    request = json.loads(_receive(connection, int.from_bytes(data, "big")))
    [output] = descriptors
    pid = os.fork()
    if pid == 0:
        for one in (connection, listener, *clients.values()):
            one.detach()
        _become(request["arguments"], request["cwd"], request["env"], output)
    os.close(output)
    return pid


def _become(
    arguments: Sequence[str], cwd: str, env: Mapping[str, str], output: int | None
) -> NoReturn:
    """In the fork: become ``python ARGUMENTS``, and exit as it does.

    ``output`` replaces the standard streams; without it they stay what they are. Every other
    descriptor is closed, as by an exec.
    """
    if output is not None:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.closerange(3, 1 << 16)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # multiprocessing resolves the script's path against the folder that it was imported in.
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    sys.stdin = os.fdopen(os.dup(0), encoding="utf-8")
    # As with PYTHONUNBUFFERED.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stdout.reconfigure(write_through=True)
    code = 1
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            sys.path[0] = cwd
            _fork_workers()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


class _ForkedWorker:
    """What torchrun's agent uses of the :class:`subprocess.Popen` of a worker."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.args, self.returncode = arguments, None
        self.pid = os.fork()
        if self.pid == 0:
            _become([one for one in arguments[1:] if one != "-u"], str(Path.cwd()), env, None)

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def _fork_workers() -> None:
    """Let torchrun's agent, which this process becomes, fork its workers instead of exec'ing."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    # Redirected output is not supported: no test redirects it.
    def popen(_: object, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return _ForkedWorker(args, env)

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[assignment]


if __name__ == "__main__":
    _serve(sys.argv[1])
