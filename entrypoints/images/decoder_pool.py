"""Runs image decoders in processes of their own, so that a crash costs one image.

A decoder is C code that reads files of unknown origin. Whatever such a file does to it happens in a
child process without threads: the image in flight is decoded once more in a fresh process and is
skipped if that process crashes, too. So an image that crashes its decoder is skipped in every run
and after every restart, while one that was in flight by accident is not.

Three kinds of processes take part. The *client* calls :meth:`DecoderPool.call` in any of its
threads. The *supervisor*, forked from the client before it has threads, forks the *decoders* and
replaces one that died; a fork takes milliseconds, where a new interpreter would take seconds.
Client and decoder share memory: a head with the numbers of the request in flight and of the last
finished one, then the image, then the pixels.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import pickle
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import LifoQueue
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from sm_train.entrypoints.images.image_header import DecodeError

T = TypeVar("T")
Pixels = NDArray[np.uint8]

DECODE_SECONDS = 300.0
"""Longest time for one image. The largest one allowed takes seconds on an idle machine."""

_ATTEMPTS = 2
"""Decodings of an image that crashes: the first crash may be the late effect of another image."""

_KILL_SECONDS = 10.0
"""How long to wait for the report of a decoder that was killed."""

_STARTED, _FINISHED, _PID = 0, 8, 16
"""Offsets in the head of shared memory: number of the request in flight, number of the last
finished one, process id of the decoder; 8 bytes each."""

_ANSWER = struct.Struct("=qq")
"""Number of a request, and the size of its pickled outcome in shared memory. 0: the outcome is in
the message. :data:`_CRASHED`: the message holds the exit status of the decoder."""
_CRASHED = -1

_CONTENT = 64
"""Offset of the content in shared memory, after the head."""

_MIN_BYTES = 1 << 20
_KEPT_BYTES = 1 << 26
"""Memory that a decoder keeps, shared and freed; more is returned after a large image."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3). Its largest mmap threshold is 32 MiB."""

_MESSAGE_BYTES = 1 << 14
"""Larger results travel through shared memory."""


class Decoders(Protocol):
    """Runs functions of image files, whose first argument is the file's content."""

    def call(self, function: Callable[..., T], content: bytes | memoryview, *arguments: Any) -> T:
        """Return ``function(content, *arguments)``.

        Raises:
            DecodeError: the function raised it, crashed or took too long.
        """
        ...

    def fill(
        self,
        function: Callable[..., None],
        content: bytes | memoryview,
        out: Pixels,
        *arguments: Any,
    ) -> None:
        """Call ``function(content, out, *arguments)``, which writes all of ``out``.

        Raises:
            DecodeError: the function raised it, crashed or took too long.
        """
        ...


class InProcessDecoders:
    """Runs the functions in the caller's process, which a crash ends."""

    def call(self, function: Callable[..., T], content: bytes | memoryview, *arguments: Any) -> T:
        """Return ``function(content, *arguments)``."""
        return function(content, *arguments)

    def fill(
        self,
        function: Callable[..., None],
        content: bytes | memoryview,
        out: Pixels,
        *arguments: Any,
    ) -> None:
        """Call ``function(content, out, *arguments)``."""
        function(content, out, *arguments)


class DecoderPool:
    """Runs the functions in ``count`` decoder processes; thread-safe.

    Create it while the process has no other threads, as it forks. Functions and arguments are
    pickled. The processes end with the client.
    """

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._idle: LifoQueue[_Slot] = LifoQueue()
        for slot in self._slots:
            self._idle.put(slot)
        client, self._life = Pipe(duplex=False)
        self._supervisor = os.fork()
        if not self._supervisor:
            try:
                _supervise(self._slots, client)
            finally:
                os._exit(1)
        client.close()
        for slot in self._slots:
            slot.theirs.close()

    def close(self) -> None:
        """End the processes."""
        self._life.close()
        for slot in self._slots:
            slot.ours.close()
        os.waitpid(self._supervisor, 0)

    def call(self, function: Callable[..., T], content: bytes | memoryview, *arguments: Any) -> T:
        """Return ``function(content, *arguments)``.

        Raises:
            DecodeError: the function raised it, crashed twice or took too long.
            RuntimeError: the decoder processes were killed.
        """
        slot = self._idle.get()
        try:
            result: T = slot.run(function, content, 0, arguments)
            return result
        finally:
            self._idle.put(slot)

    def fill(
        self,
        function: Callable[..., None],
        content: bytes | memoryview,
        out: Pixels,
        *arguments: Any,
    ) -> None:
        """Call ``function(content, pixels, *arguments)`` and copy ``pixels`` to ``out``.

        Raises:
            DecodeError: the function raised it, crashed twice or took too long.
            RuntimeError: the decoder processes were killed.
        """
        slot = self._idle.get()
        try:
            slot.run(function, content, out.nbytes, arguments)
            out[...] = slot.memory.pixels(len(content), out.nbytes).reshape(out.shape)
        finally:
            self._idle.put(slot)


class _Memory:
    """Memory that client and decoder share; it grows with the images."""

    def __init__(self) -> None:
        self._descriptor = _shared_file()
        self._map = mmap.mmap(-1, 1)
        self.reserve(_MIN_BYTES)

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def reserve(self, size: int) -> None:
        """Let at least ``size`` bytes be mapped in this process."""
        if size > len(self._map):
            size = max(_MIN_BYTES, 1 << (size - 1).bit_length())
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            # The old mapping stays valid for arrays that refer to it.
            self._map = mmap.mmap(self._descriptor, size)

    def shrink(self) -> None:
        """Return the memory of a large image to the system."""
        if len(self._map) > _KEPT_BYTES:
            os.ftruncate(self._descriptor, _MIN_BYTES)
            self._map = mmap.mmap(self._descriptor, _MIN_BYTES)

    def view(self, size: int) -> memoryview:
        """Return the ``size`` bytes of the content."""
        return memoryview(self._map)[_CONTENT : _CONTENT + size]

    def pixels(self, content_bytes: int, size: int) -> Pixels:
        """Return the ``size`` bytes behind the content, as uint8 (size,)."""
        return np.frombuffer(self._map, np.uint8, size, _pixels_offset(content_bytes))

    def get(self, offset: int) -> int:
        (value,) = struct.unpack_from("=q", self._map, offset)
        return int(value)

    def put(self, offset: int, value: int) -> None:
        # One copy: pack_into would set the word to 0 first, which the other process may read.
        self._map[offset : offset + 8] = struct.pack("=q", value)


def _pixels_offset(content_bytes: int) -> int:
    return -(-(_CONTENT + content_bytes) // _CONTENT) * _CONTENT


def _shared_file() -> int:
    """Return the descriptor of a file in memory or, where the system has none, on disk."""
    if hasattr(os, "memfd_create"):
        return int(os.memfd_create("decoder"))
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _Slot:
    """One decoder's connection and memory, kept when its process is replaced."""

    def __init__(self) -> None:
        self.memory = _Memory()
        self.ours, self.theirs = Pipe()
        self._number = 0

    def run(
        self,
        function: Callable[..., Any],
        content: bytes | memoryview,
        out_bytes: int,
        arguments: tuple[Any, ...],
    ) -> Any:
        """Run a function in the decoder; return its result or raise its exception."""
        self.memory.shrink()
        self.memory.reserve(_pixels_offset(len(content)) + out_bytes)
        outcome: Any = None
        for _ in range(_ATTEMPTS):
            self.memory.view(len(content))[:] = content
            self._number += 1
            self.memory.put(_STARTED, self._number)
            request = (self._number, function, len(content), out_bytes, arguments)
            outcome = self._answer(pickle.dumps(request))
            if not isinstance(outcome, _Crash):
                break
        if isinstance(outcome, _Crash):
            raise DecodeError("decoder-crash", f"the decoder {outcome.cause}")
        succeeded, value = outcome
        if not succeeded:
            raise value
        return value

    def _answer(self, request: bytes) -> Any:
        """Return (succeeded, value) of the request, or a :class:`_Crash`."""
        try:
            self.ours.send_bytes(request)
            while self.ours.poll(DECODE_SECONDS):
                message = self.ours.recv_bytes()
                number, size = _ANSWER.unpack_from(message)
                if number == self._number:  # any other has been given up
                    return self._outcome(size, message[_ANSWER.size :])
        except (EOFError, OSError):
            raise RuntimeError("the processes that decode images were killed") from None
        # No decoder was ever started if its process hung in the fork; 0 is the caller's own group.
        if process := self.memory.get(_PID):
            os.kill(process, signal.SIGKILL)
        self.ours.poll(_KILL_SECONDS)  # the report of it is ignored when the next answer is read
        raise DecodeError("decoder-timeout", f"not decoded within {DECODE_SECONDS:.0f} s")

    def _outcome(self, size: int, content: bytes) -> Any:
        if size == _CRASHED:
            return _Crash(int.from_bytes(content, "little"))
        if not size:
            return pickle.loads(content)
        self.memory.reserve(_CONTENT + size)
        return pickle.loads(self.memory.view(size))


class _Crash:
    """The end of a decoder in the middle of a request; ``status`` is wait's."""

    def __init__(self, status: int) -> None:
        self._status = status

    @property
    def cause(self) -> str:
        code = os.waitstatus_to_exitcode(self._status)
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


# ------------------------------------------------------------------------------ the other processes


def _supervise(slots: Sequence[_Slot], client: Connection) -> None:
    """Run a decoder for each slot, and a new one whenever one dies, until ``client`` is closed."""
    _leave_client(slots, client)
    child_ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up needs a handler
    decoders = {_fork_decoder(slot): slot for slot in slots}
    while client not in wait([client, child_ended]):
        os.read(child_ended, 64)
        for process, status in _ended_children():
            slot = decoders.pop(process)
            decoders[_fork_decoder(slot)] = slot
            _report_crash(slot, status)
    for process in decoders:
        os.kill(process, signal.SIGKILL)
    os._exit(0)


def _ended_children() -> Iterator[tuple[int, int]]:
    while True:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        yield process, status


def _report_crash(slot: _Slot, status: int) -> None:
    """Answer the request in flight, if any, with its decoder's exit status."""
    started = slot.memory.get(_STARTED)
    if started != slot.memory.get(_FINISHED):
        slot.memory.put(_FINISHED, started)
        report = _ANSWER.pack(started, _CRASHED) + status.to_bytes(4, "little")
        with suppress(OSError):  # the client has ended
            slot.theirs.send_bytes(report)


def _leave_client(slots: Sequence[_Slot], client: Connection) -> None:
    """Drop what a forked process inherits from the client."""
    gc.freeze()  # finalizers must not close descriptors that are in use for something else by then
    faulthandler.disable()  # a crash here is no failure of the job
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # these processes end with the client
    kept = {0, 1, 2, client.fileno()}
    kept |= {slot.theirs.fileno() for slot in slots} | {slot.memory.descriptor for slot in slots}
    edges = sorted(kept)
    for below, above in zip(edges, [*edges[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(below + 1, above)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # decoders and the C library print warnings
        os.dup2(nowhere, descriptor)


def _fork_decoder(slot: _Slot) -> int:
    process = os.fork()
    if process:
        slot.memory.put(_PID, process)
        return process
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if "torch" in sys.modules:
            # The threads of OpenMP's pool do not survive a fork: a parallel loop would wait for
            # them forever.
            sys.modules["torch"].set_num_threads(1)
        _keep_freed_memory()
        _serve(slot)
    finally:
        os._exit(1)


def _keep_freed_memory() -> None:
    """Let the C library keep what an image took for the next one, up to :data:`_KEPT_BYTES`.

    It would return most of it to the kernel after each image, whose pages the next one would get
    back by hundreds of page faults: half of the time of an image of 512 px. Other libraries than
    glibc have no such function.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 2)


def _serve(slot: _Slot) -> None:
    """Answer requests until the client ends."""
    connection: Connection = slot.theirs
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        number, function, content_bytes, out_bytes, arguments = pickle.loads(request)
        slot.memory.reserve(_pixels_offset(content_bytes) + out_bytes)
        outcome = pickle.dumps(_outcome(slot, function, content_bytes, out_bytes, arguments))
        answer = _ANSWER.pack(number, 0) + outcome
        if len(outcome) > _MESSAGE_BYTES:
            slot.memory.reserve(_CONTENT + len(outcome))
            slot.memory.view(len(outcome))[:] = outcome
            answer = _ANSWER.pack(number, len(outcome))
        try:
            connection.send_bytes(answer)
        except OSError:
            os._exit(0)
        slot.memory.put(_FINISHED, number)


def _outcome(
    slot: _Slot,
    function: Callable[..., Any],
    content_bytes: int,
    out_bytes: int,
    arguments: tuple[Any, ...],
) -> tuple[bool, Any]:
    """Return (True, the result) or (False, an exception)."""
    content = slot.memory.view(content_bytes)
    out = (slot.memory.pixels(content_bytes, out_bytes),) if out_bytes else ()
    try:
        return True, function(content, *out, *arguments)
    except DecodeError as error:
        return False, error
    except MemoryError:
        return False, DecodeError("image-memory", "decoding it takes too much memory")
    except Exception as error:
        text = traceback.format_exc()
        return False, RuntimeError(f"{type(error).__name__} in a decoder: {error}\n{text}")
