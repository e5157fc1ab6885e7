"""Finds samples of a shard that cannot be trained on: their image or caption is not with them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sm_train.entrypoints.job_interface.job_config import CaptionSource
from sm_train.entrypoints.sample_metadata.captions import choose_caption
from sm_train.entrypoints.shards.tar_reader import (
    TarBytes,
    TarError,
    TarScan,
    is_compressed,
    printable_name,
    sample_members,
    split_name,
)

COMPRESSED, SPARSE, REPEATED = "compressed", "sparse", "repeated-file"
HARD_LINK = "hard-link"
UNREADABLE = "image-unreadable"
_NAMED = 3


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
repeated-file, hard-link, compressed or sparse."""


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
        found = {SPARSE: scan.sparse, HARD_LINK: scan.links, REPEATED: scan.repeated}
        for reason, members in found.items():
            if members:
                unusable[reason] = UnusableSamples()
                named = [f"{name} {printable_name(member)}" for member in members]
                unusable[reason].add(len(members), named)
        for reason, sample in _unusable(tar, scan, files):
            names = [f"{name} {printable_name(sample)}"]
            unusable.setdefault(reason, UnusableSamples()).add(1, names)
    return unusable


def _unusable(tar: TarBytes, scan: TarScan, files: SampleFiles) -> Iterator[tuple[str, str]]:
    """Yield the reason and the name of each unusable sample; of a dotted name, of each image."""
    repeated = {key for key, times in Counter(scan.keys).items() if times > 1}
    linked = {split_name(name)[0] for name in scan.links}
    for number, (key, extensions) in enumerate(zip(scan.keys, scan.extensions, strict=True)):
        has_image = any(extension in files.image for extension in extensions)
        if key in linked or (has_image and _has_caption(tar, scan, number, files.caption)):
            continue  # what a sample lacks is a link, which has been named
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
