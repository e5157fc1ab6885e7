"""Finds samples of a shard that cannot be trained on: their image or caption is not with them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sm_train.entrypoints.common.job_config import CaptionSource
from sm_train.entrypoints.data.tar_reader import (
    TarBytes,
    TarError,
    TarScan,
    printable_name,
    sample_members,
)
from sm_train.entrypoints.sample_metadata.captions import choose_caption

COMPRESSED, SPARSE = "compressed", "sparse"
UNREADABLE = "image-unreadable"
_NAMED = 3
_MAGIC = (b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh", b"\x28\xb5\x2f\xfd")
"""How files begin that gzip, xz, bzip2 and zstd have compressed."""


@dataclass(frozen=True)
class SampleFiles:
    """The files of a sample that training reads, by extension.

    ``image`` are those of its image, of which one is needed. ``caption`` are the sources of its
    caption, of which one is needed.
    """

    image: tuple[str, ...] = ("jpg", "jpeg", "png", "webp")
    caption: tuple[CaptionSource, ...] = (CaptionSource("txt", None, 1.0),)


IMAGE_AND_TEXT = SampleFiles()


@dataclass
class UnusableSamples:
    """The number of unusable samples of one kind, and the first three names."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, count: int, names: Iterable[str]) -> None:
        """Add ``count`` samples; ``names`` are their names, or the first of them."""
        self.count += count
        self.first += list(names)[: _NAMED - len(self.first)]


Unusable = dict[str, UnusableSamples]
"""Unusable samples by reason: no-image, image-unreadable, no-caption, dotted-name, separated,
compressed or sparse."""


def merge_unusable(total: Unusable, found: Unusable) -> None:
    """Add the samples of ``found`` to ``total``."""
    for reason, samples in found.items():
        total.setdefault(reason, UnusableSamples()).add(samples.count, samples.first)


def find_unusable(tar: TarBytes, name: str, scan: TarScan, files: SampleFiles | None) -> Unusable:
    """Return the samples of a scanned shard that cannot be trained on.

    A compressed shard counts as one, because its samples are not visible. Without ``files``
    nothing else is looked for.

    Raises:
        OSError: the shard cannot be read.
    """
    unusable: Unusable = {}
    if is_compressed(tar):
        unusable[COMPRESSED] = UnusableSamples(1, [name])
    elif files is not None:
        if scan.sparse:
            unusable[SPARSE] = UnusableSamples()
            unusable[SPARSE].add(len(scan.sparse), [f"{name} {file}" for file in scan.sparse])
        for reason, sample in _unusable(tar, scan, files):
            names = [f"{name} {printable_name(sample)}"]
            unusable.setdefault(reason, UnusableSamples()).add(1, names)
    return unusable


def is_compressed(tar: TarBytes) -> bool:
    """Return whether it is a compressed archive."""
    return tar.pread(max(map(len, _MAGIC)), 0).startswith(_MAGIC)


def _unusable(tar: TarBytes, scan: TarScan, files: SampleFiles) -> Iterator[tuple[str, str]]:
    """Yield the reason and the name of each unusable sample; of a dotted name, of each image."""
    repeated = {key for key, times in Counter(scan.keys).items() if times > 1}
    for number, (key, extensions) in enumerate(zip(scan.keys, scan.extensions, strict=True)):
        has_image = any(extension in files.image for extension in extensions)
        if has_image and _has_caption(tar, scan, number, files.caption):
            continue
        dotted = [
            extension for extension in extensions if extension.rpartition(".")[2] in files.image
        ]
        if not has_image and dotted:
            yield from (("dotted-name", f"{key}.{extension}") for extension in dotted)
        elif key in repeated:
            yield "separated", key
        else:
            yield "no-caption" if has_image else "no-image", key


def _has_caption(
    tar: TarBytes, scan: TarScan, number: int, sources: tuple[CaptionSource, ...]
) -> bool:
    """Return whether a sample has a caption; a field of a JSON file must hold a text."""
    present = [source for source in sources if source.member in scan.extensions[number]]
    if not present or any(source.field is None for source in present):
        return bool(present)
    start, stop = int(scan.starts[number]), int(scan.stops[number])
    try:
        _, members = sample_members(memoryview(tar.pread(stop - start, start)))
        return choose_caption(members, present, 0.5) is not None
    except (TarError, UnicodeDecodeError, json.JSONDecodeError):
        return False
