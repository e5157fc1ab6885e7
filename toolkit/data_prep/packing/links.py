"""Finds links that lead out of the folder to pack: their content would be packed unnoticed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from sm_train.entrypoints.shards.shard_index import RejectedInput
from sm_train.toolkit.data_prep.packing.source_image import SourceImage


class SourceFolder:
    """A folder to pack; it may contain links, but only to its own files and folders."""

    def __init__(self, root: Path) -> None:
        self._real_root = os.path.realpath(root)
        # Resolving each of a million files would cost more than listing them.
        self._real_parent: Callable[[Path], str] = lru_cache(maxsize=4096)(os.path.realpath)

    def reject(self, image: SourceImage) -> RejectedInput | None:
        """Return why ``image`` is not packed, if the file or its caption lies outside."""
        for address, what in ((image.address, "a link"), (image.caption_address, "its caption")):
            if address is not None and (target := self._outside(Path(address))):
                return _rejection(image.source, what, target)
        return None

    def reject_subfolder(self, path: Path, name: str) -> RejectedInput | None:
        """Return why the images of the folder ``path`` are not packed, if it lies outside."""
        target = self._outside(path)
        return None if target is None else _rejection(name, "a link", target)

    def _outside(self, path: Path) -> str | None:
        """Return where ``path`` leads, relative to the folder, if that lies outside."""
        # Path.is_symlink raises for a name that is too long.
        if os.path.islink(path):  # noqa: PTH114
            real = os.path.realpath(path)
        else:
            real = os.path.join(self._real_parent(path.parent), path.name)  # noqa: PTH118
        if os.path.commonpath([self._real_root, real]) == self._real_root:
            return None
        return os.path.relpath(real, self._real_root)


def _rejection(source: str, what: str, target: str) -> RejectedInput:
    detail = f"{what} leads to {target}, outside the folder to pack; copy it there"
    return RejectedInput(source, "outside-source", detail)


def images_inside(
    images: Iterable[SourceImage], folder: SourceFolder, reject: Callable[[RejectedInput], None]
) -> Iterator[SourceImage]:
    """Yield the images that lie in ``folder`` with their captions; call ``reject`` with others."""
    for image in images:
        if rejection := folder.reject(image):
            reject(rejection)
        else:
            yield image
