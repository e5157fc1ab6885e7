"""Starts Python programs by forking a process that has imported PyTorch and related libraries.

Importing torch, accelerate, diffusers and transformers takes five seconds of CPU time, more than
the few training steps of most tests. One server process for each pytest worker imports them once;
every training process and every torchrun agent is a fork of it that runs its script as
``__main__``, with a separate environment, working directory, session and standard streams. The
server imports third-party code only: ``sm_train`` is imported in the fork, from the bundle under
test.

Tests of another Python environment (``TRAIN_PYTHON``), the SDK's start script, ``accelerate
launch`` and containers start a new interpreter instead.
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
"""Variables that the libraries read when they are imported; every fork has these values."""

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

_HEADER_BYTES = 8
"""Size of the length field before each request; the server returns the PID in the same format."""


class ForkedProcess:
    """A program started by the server; has the methods of :class:`subprocess.Popen` that tests use.

    ``exit_status`` is the connection on which the server sends the exit code.
    """

    def __init__(self, pid: int, stdout: IO[str], exit_status: socket.socket) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._exit_status = exit_status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or the negative number of the signal that killed the process.

        Raises:
            subprocess.TimeoutExpired: The process is still running.
        """
        if self.returncode is None:
            self._exit_status.settimeout(timeout)
            try:
                status = self._exit_status.recv(16)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            # Without a status the server itself was killed, and its forks with it.
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

    Standard output and standard error share one pipe; standard input is empty.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(_server())
    read, write = os.pipe()
    request = json.dumps(
        {"arguments": list(arguments), "cwd": str(cwd), "env": {**env, **IMPORT_TIME_ENVIRONMENT}}
    ).encode()
    client.sendmsg(
        [len(request).to_bytes(_HEADER_BYTES, "big") + request],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))],
    )
    os.close(write)
    pid = int.from_bytes(_receive(client, _HEADER_BYTES), "big")
    return ForkedProcess(pid, os.fdopen(read, encoding="utf-8", errors="replace"), client)


@cache
def _server() -> str:
    """Start this process's server on first use; return the path of its socket."""
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
"""Keeps the pipe to the server's standard input open: the server exits when the pipe closes."""


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        data = connection.recv(size - len(received))
        if not data:
            raise ConnectionError("the server of forked processes closed the connection")
        received += data
    return received


def _serve(address: str) -> None:
    """Run the server: fork for each request and send each client the exit code of its process."""
    from importlib import import_module

    for name in PRELOADED:
        import_module(name)
    assert threading.active_count() == 1, "an import started threads, which a fork would lack"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    threading.Thread(target=_exit_with_client, daemon=True).start()
    print("ready", flush=True)
    clients: dict[int, socket.socket] = {}
    listener.settimeout(0.02)  # accept and reap in turns, without a second thread
    while True:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.setblocking(True)
            pid = _fork(connection, listener, clients)
            clients[pid] = connection
            connection.sendall(pid.to_bytes(_HEADER_BYTES, "big"))
        while True:  # reap every process that has exited
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            with clients.pop(pid) as client, suppress(OSError):
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _exit_with_client() -> None:
    """Exit when the process that started the server exits and so closes the server's stdin."""
    sys.stdin.buffer.read()
    os._exit(0)


def _fork(
    connection: socket.socket, listener: socket.socket, clients: Mapping[int, socket.socket]
) -> int:
    """Fork for the request on ``connection``; return the PID of the fork."""
    data, descriptors, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 1)
    while len(data) < _HEADER_BYTES:
        data += _receive(connection, _HEADER_BYTES - len(data))
    request = json.loads(_receive(connection, int.from_bytes(data, "big")))
    [output] = descriptors
    pid = os.fork()
    if pid == 0:
        # _become_python closes the descriptors; detached sockets do not close them once more.
        for inherited in (connection, listener, *clients.values()):
            inherited.detach()
        _become_python(request["arguments"], request["cwd"], request["env"], output)
    os.close(output)
    return pid


def _become_python(
    arguments: Sequence[str], cwd: str, env: Mapping[str, str], output: int | None
) -> NoReturn:
    """Run ``python ARGUMENTS`` in this fork and exit with its exit code.

    ``output`` replaces standard output and error, and standard input is emptied; with None the
    streams stay as they are. Every other descriptor is closed, as by an exec.
    """
    if output is not None:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
    os.closerange(3, 1 << 16)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # multiprocessing resolves the script's path against the folder that it was imported in.
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    # An exec resets signal handlers and the wakeup descriptor; a fork inherits them.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    sys.stdin = os.fdopen(os.dup(0), encoding="utf-8")
    # Unbuffered, as with PYTHONUNBUFFERED.
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
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


class _ForkedWorker:
    """A forked worker; offers the part of :class:`subprocess.Popen` that torchrun's agent uses."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.args, self.returncode = arguments, None
        self.pid = os.fork()
        if self.pid == 0:
            _become_python(
                [argument for argument in arguments[1:] if argument != "-u"],
                str(Path.cwd()),
                env,
                None,
            )

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
    """Make torchrun's agent, which will run in this process, fork its workers instead of exec."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    # Ignores the paths for redirected output: no test redirects it.
    def popen(_: object, args: tuple[str, ...], env: dict[str, str]) -> Any:
        return _ForkedWorker(args, env)

    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[assignment]


if __name__ == "__main__":
    _serve(sys.argv[1])
