"""Copies checkpoints to the folder that takes the place of S3, as SageMaker does for a job.

What SageMaker does (docs: "Use checkpoints in Amazon SageMaker AI", read 2026-11): at the start
every node gets the whole prefix. Then each node uploads its own folder while the job writes to it,
all nodes to one prefix, and deletes in S3 what the job deletes. Nothing is downloaded into a
running node.

What users of SageMaker report: the uploads are single files in no particular order and take longer
than the writing. They leave notes (``entrypoints/records/upload_notes.py``); files called
``*.sagemaker-ignore`` stay.

Local runs and the tests of training jobs use this module.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from sm_train.entrypoints.base.atomic_write import NOT_UPLOADED_SUFFIX
from sm_train.entrypoints.records.upload_notes import UPLOADED_SUFFIX, UPLOADING_SUFFIX, note

POLL_SECONDS = 0.2
_BLOCK_BYTES = 2**20

BetweenBlocks = Callable[[int], bool]
"""Called after each block of an upload with its size in bytes; False cuts the upload short."""

_Version = tuple[int, int, int]
"""What changes when a file does: inode, time of modification and size."""


class CheckpointSync:
    """Uploads from the nodes' checkpoint ``folders`` to ``prefix``, each in a thread of its own.

    The folders are created at once, with the content of ``prefix``. ``bytes_per_second`` slows down
    each node's uploads. A failed upload is repeated; ``error`` is set if it fails at the end, too.
    """

    def __init__(
        self,
        prefix: Path,
        folders: Sequence[Path],
        *,
        seed: int | None = None,
        bytes_per_second: float | None = None,
    ) -> None:
        self.error: OSError | None = None
        self._bytes_per_second = bytes_per_second
        self._ending, self._lost = threading.Event(), threading.Event()
        lock, randomness = threading.Lock(), random.Random(seed)
        nodes = [
            NodeUploads(prefix, folder, lock, random.Random(randomness.random()))
            for folder in folders
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(node,), daemon=True) for node in nodes
        ]

    def start(self) -> None:
        """Start to upload; a second call has no effect."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def finish(self, *, instances_lost: bool = False) -> None:
        """Upload the remaining files at full speed, as SageMaker does when a job ends or fails.

        If the instances are lost, stop at once: uploads under way are lost as well.
        """
        if instances_lost:
            self._lost.set()
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _run(self, node: NodeUploads) -> None:
        def between_blocks(size: int) -> bool:
            if self._bytes_per_second is not None:
                self._ending.wait(size / self._bytes_per_second)
            return not self._lost.is_set()

        while not self._lost.is_set():
            # Read before the folder is listed: what is written later is not part of the job.
            last = self._ending.is_set()
            try:
                self._upload_all(node, between_blocks)
            except OSError as error:
                if last:
                    self.error = error
            if last:
                return
            self._ending.wait(POLL_SECONDS)

    @staticmethod
    def _upload_all(node: NodeUploads, between_blocks: BetweenBlocks) -> None:
        for name in node.changed():
            if not node.upload(name, between_blocks):
                return
        node.delete_removed()


class NodeUploads:
    """The uploads of one node: which files of its ``folder`` are in ``prefix`` in which version.

    ``lock`` is shared by all nodes that upload to the prefix.
    """

    def __init__(
        self, prefix: Path, folder: Path, lock: threading.Lock, randomness: random.Random
    ) -> None:
        self._prefix, self.folder = prefix, folder
        self._lock, self._random = lock, randomness
        prefix.mkdir(parents=True, exist_ok=True)
        shutil.copytree(prefix, folder, dirs_exist_ok=True)
        self._uploaded = dict(self._files())

    def changed(self) -> list[str]:
        """Return the files that are new or changed since their upload, in random order."""
        names = [name for name, version in self._files() if self._uploaded.get(name) != version]
        self._random.shuffle(names)
        return names

    def upload(self, name: str, between_blocks: BetweenBlocks = lambda size: True) -> bool:
        """Upload one file; return False if ``between_blocks`` cut it short.

        The object appears when all bytes have arrived. A file that is removed meanwhile is skipped.
        """
        path = self.folder / name
        with suppress(FileNotFoundError):
            version = _version(path)
            note(path, UPLOADING_SUFFIX).touch()
            uploaded = self._put(path, name, between_blocks)
            note(path, UPLOADING_SUFFIX).unlink(missing_ok=True)
            if not uploaded:
                return False
            self._uploaded[name] = version
            note(path, UPLOADED_SUFFIX).touch()
        return True

    def _put(self, path: Path, name: str, between_blocks: BetweenBlocks) -> bool:
        incoming = self._prefix.parent / f".{self._prefix.name}-{os.getpid()}-{id(self)}"
        try:
            with path.open("rb") as source, incoming.open("wb") as target:
                while block := source.read(_BLOCK_BYTES):
                    target.write(block)
                    if not between_blocks(len(block)):
                        return False
            with self._lock:
                (self._prefix / name).parent.mkdir(parents=True, exist_ok=True)
                incoming.replace(self._prefix / name)
        finally:
            incoming.unlink(missing_ok=True)
        return True

    def delete_removed(self) -> None:
        """Delete in S3 what was removed from the folder since its upload."""
        present = {name for name, _ in self._files()}
        for name in self._uploaded.keys() - present:
            del self._uploaded[name]
            note(self.folder / name, UPLOADED_SUFFIX).unlink(missing_ok=True)
            with self._lock:
                (self._prefix / name).unlink(missing_ok=True)
                self._remove_empty(self._prefix / PurePosixPath(name).parent)

    def _remove_empty(self, folder: Path) -> None:
        """Remove folders that hold nothing: S3 has none."""
        with suppress(OSError):
            while folder != self._prefix:
                folder.rmdir()
                folder = folder.parent

    def _files(self) -> Iterator[tuple[str, _Version]]:
        """Yield path, relative to the folder, and version of each file that SageMaker uploads."""
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = Path(parent, name)
                if path.suffix not in (NOT_UPLOADED_SUFFIX, UPLOADING_SUFFIX, UPLOADED_SUFFIX):
                    # The job may remove it at any time.
                    with suppress(FileNotFoundError):
                        yield path.relative_to(self.folder).as_posix(), _version(path)


def _version(path: Path) -> _Version:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
