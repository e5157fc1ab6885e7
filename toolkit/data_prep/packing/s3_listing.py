"""Lists the images and captions below an S3 prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import Full, Queue
from threading import Event, Lock, Thread
from typing import TypeVar

from sm_train.entrypoints.data_prep.packing.plan import CAPTION_SUFFIXES
from sm_train.entrypoints.storage.store import S3Access, StoredObject, open_store
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.data_prep.packing.file_kinds import FileSelection, is_text, stem
from sm_train.toolkit.data_prep.packing.input_sorter import InputSorter
from sm_train.toolkit.data_prep.packing.source_image import SourceImage

LISTINGS = 16
"""Folders that are listed at the same time."""

_LEVELS = 4
"""Levels of folders that are searched for enough of them."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def listing_root(uri: str) -> str:
    """Return the S3 folder that sources are relative to: that of the prefix."""
    bucket, prefix = split_uri(uri)
    return f"s3://{bucket}/{prefix[: prefix.rfind('/') + 1]}"


def collect_objects(
    uri: str, access: S3Access, selection: FileSelection, sorter: InputSorter
) -> None:
    """Add the images below an S3 prefix, each with the ``.txt`` object of the same name."""
    bucket, prefix = split_uri(uri)
    collector = ObjectCollector(listing_root(uri), selection, sorter)
    with translate_aws_errors(uri):
        for stored in _list_in_parallel(access, bucket, prefix):
            modified_ns = int(stored.modified.timestamp() * 1e9)
            collector.add(f"s3://{bucket}/{stored.key}", stored.bytes, modified_ns)


def _list_in_parallel(access: S3Access, bucket: str, prefix: str) -> Iterator[StoredObject]:
    """Yield the objects below a prefix, in any order; its folders are listed at the same time.

    S3 lists a prefix one page of 1,000 objects after another, so threads list different folders.
    Those are found level by level, until there is one for each thread.
    """
    store = open_store(access)
    folders = [prefix]
    for _ in range(_LEVELS):
        if not 0 < len(folders) < LISTINGS:
            break
        parents, folders = folders, []
        for parent in parents:
            for page in store.pages(bucket, parent, delimiter="/"):
                yield from page.objects
                folders += page.folders

    def list_folder(folder: str) -> Iterator[list[StoredObject]]:
        return (page.objects for page in store.pages(bucket, folder))

    for objects in merge_in_threads(list_folder, folders, LISTINGS):
        yield from objects


class ObjectCollector:
    """Sorts listed objects into images, their captions and others."""

    def __init__(self, root: str, selection: FileSelection, sorter: InputSorter) -> None:
        self._root, self._selection, self._sorter = root, selection, sorter

    def add(self, address: str, size: int, modified_ns: int) -> None:
        """Add an object, which may have any name."""
        name = address.removeprefix(self._root)
        if name.endswith("/"):  # a folder marker of the S3 console
            return
        if is_text(name):
            self._sorter.add_text(name, size, modified_ns)
            return
        if self._selection.is_image(name):
            caption = f"{self._root}{stem(name)}{CAPTION_SUFFIXES[0]}"
            image = SourceImage(name, address, size, modified_ns, caption_address=caption)
            self._sorter.add(image, stem(name))
        else:
            self._selection.skip(name)
            self._sorter.add_other(stem(name))


def merge_in_threads(
    task: Callable[[_Item], Iterable[_Result]], items: Iterable[_Item], threads: int
) -> Iterator[_Result]:
    """Yield the results of ``task`` for all items, computed by threads, in any order.

    The threads wait while four results of each are unused. The first error of a task is raised.
    """
    results: Queue[list[_Result] | BaseException | None] = Queue(maxsize=4 * threads)
    stop, lock, remaining = Event(), Lock(), iter(items)

    def put(result: list[_Result] | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                results.put(result, timeout=0.2)
            except Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            while True:
                with lock:
                    item = next(remaining, None)
                if item is None or not all(put([result]) for result in task(item)):
                    break
        except BaseException as error:  # raised by the caller's thread
            put(error)
        put(None)

    workers = [Thread(target=work, daemon=True) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        running = threads
        while running:
            result = results.get()
            if result is None:
                running -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield from result
    finally:
        stop.set()
        for worker in workers:
            worker.join()
