"""Both readers and the index agree on the samples of a tar, whoever wrote it.

Tars of GNU tar, Python and webdataset's own writer, and others with what people's tools put into
them. Each names the samples that all three must find, and what the index must say of the rest.
"""

from __future__ import annotations

import gzip
import io
import itertools
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import webdataset
from sm_train.entrypoints.data_loading.webdataset_reader import _sample_stages
from sm_train.entrypoints.data_prep.packing.describe_shard import describe_shard
from sm_train.entrypoints.sample_metadata.captions import caption_text
from sm_train.entrypoints.shards.tar_reader import sample_members, scan_tar

from tests.support.image_files import image_bytes

Samples = list[tuple[str, bytes | None, str | None]]
"""Key, image and caption of each sample."""

IMAGE = image_bytes(1)
PLAIN = [("000.jpg", IMAGE), ("000.txt", b"cap 0"), ("001.jpg", IMAGE), ("001.txt", b"cap 1")]
BOTH: Samples = [("000", IMAGE, "cap 0"), ("001", IMAGE, "cap 1")]


def python_tar(
    members: list[tuple[str, bytes]], archive_format: int = tarfile.USTAR_FORMAT
) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=archive_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


def with_entries(*entries: tuple[str, bytes, str], files: list[tuple[str, bytes]] = PLAIN) -> bytes:
    """Return a tar with entries that are no files, after its first file: name, type and target."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number, (name, data) in enumerate(files):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            for entry, kind, target in entries if number == 0 else ():
                other = tarfile.TarInfo(entry)
                other.type, other.linkname = kind, target
                tar.addfile(other)
    return content.getvalue()


def gnu_tar(folder: Path, *options: str, files: list[tuple[str, bytes]] = PLAIN) -> bytes:
    """Return what GNU tar makes of files below ``photos/``."""
    (folder / "photos").mkdir()
    for name, data in files:
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    subprocess.run(
        ["tar", "--sort=name", *options, "-cf", "gnu.tar", "photos"], cwd=folder, check=True
    )
    return (folder / "gnu.tar").read_bytes()


def linked_tar(folder: Path, *options: str) -> bytes:
    """Return a tar of two samples, the second of which has a hard link to the first one's image."""
    (folder / "photos").mkdir()
    for name, data in PLAIN:
        (folder / "photos" / name).write_bytes(data)
    (folder / "photos" / "001.jpg").unlink()
    (folder / "photos" / "001.jpg").hardlink_to(folder / "photos" / "000.jpg")
    subprocess.run(
        ["tar", "--sort=name", *options, "-cf", "gnu.tar", "photos"], cwd=folder, check=True
    )
    return (folder / "gnu.tar").read_bytes()


def symbolic_tar(folder: Path, *options: str) -> bytes:
    (folder / "photos").mkdir()
    for name, data in PLAIN:
        (folder / "photos" / name).write_bytes(data)
    (folder / "photos" / "001.jpg").unlink()
    (folder / "photos" / "001.jpg").symlink_to("000.jpg")
    subprocess.run(
        ["tar", "--sort=name", *options, "-cf", "gnu.tar", "photos"], cwd=folder, check=True
    )
    return (folder / "gnu.tar").read_bytes()


def webdataset_tar(folder: Path, **options: Any) -> bytes:
    with webdataset.TarWriter(str(folder / "written.tar"), **options) as writer:
        for key in ("000", "001"):
            writer.write({"__key__": key, "jpg": IMAGE, "txt": f"cap {int(key)}"})
    return (folder / "written.tar").read_bytes()


def in_folder(samples: Samples, folder: str = "photos") -> Samples:
    return [(f"{folder}/{key}", image, caption) for key, image, caption in samples]


LONG = "a" * 120
DEEP = "/".join(["d" * 50] * 3)
APPLE = b"\0\5\x16\7\0\2\0\0Mac OS X        "
FIRST: Samples = [("000", IMAGE, "cap 0")]

Make = Callable[[Path], bytes]

TARS: dict[str, tuple[Make, Samples, set[str]]] = {
    "ustar": (lambda _: python_tar(PLAIN), BOTH, set()),
    "gnu format": (lambda _: python_tar(PLAIN, tarfile.GNU_FORMAT), BOTH, set()),
    "pax format": (lambda _: python_tar(PLAIN, tarfile.PAX_FORMAT), BOTH, set()),
    "GNU tar": (gnu_tar, in_folder(BOTH), set()),
    "GNU tar, pax": (lambda folder: gnu_tar(folder, "--format=pax"), in_folder(BOTH), set()),
    "GNU tar, ustar": (lambda folder: gnu_tar(folder, "--format=ustar"), in_folder(BOTH), set()),
    "GNU tar, v7": (lambda folder: gnu_tar(folder, "--format=v7"), in_folder(BOTH), set()),
    "GNU tar, blocks": (lambda folder: gnu_tar(folder, "-b", "1"), in_folder(BOTH), set()),
    "webdataset": (webdataset_tar, BOTH, set()),
    "dots before names": (
        lambda _: python_tar([(f"./{name}", data) for name, data in PLAIN]),
        in_folder(BOTH, "."),
        set(),
    ),
    "long names, GNU": (
        lambda _: python_tar([(LONG + name, data) for name, data in PLAIN], tarfile.GNU_FORMAT),
        [(LONG + key, image, caption) for key, image, caption in BOTH],
        set(),
    ),
    "long names, pax": (
        lambda _: python_tar([(LONG + name, data) for name, data in PLAIN], tarfile.PAX_FORMAT),
        [(LONG + key, image, caption) for key, image, caption in BOTH],
        set(),
    ),
    "deep folders": (
        lambda _: python_tar([(f"{DEEP}/{name}", data) for name, data in PLAIN]),
        in_folder(BOTH, DEEP),
        set(),
    ),
    "names of other alphabets": (
        lambda _: python_tar([(f"größe-{name}", data) for name, data in PLAIN], tarfile.PAX_FORMAT),
        [(f"größe-{key}", image, caption) for key, image, caption in BOTH],
        set(),
    ),
    "extensions in capitals": (
        lambda _: python_tar([(name.upper(), data) for name, data in PLAIN]),
        BOTH,
        set(),
    ),
    "folders as entries": (
        lambda _: with_entries(("photos", tarfile.DIRTYPE, "")),
        BOTH,
        set(),
    ),
    "pipes and devices": (
        lambda _: with_entries(
            ("pipe.jpg", tarfile.FIFOTYPE, ""), ("null.jpg", tarfile.CHRTYPE, "")
        ),
        BOTH,
        set(),
    ),
    "hidden at the top": (
        lambda _: python_tar([(".DS_Store", b"x"), *PLAIN[:1], ("._000.jpg", APPLE), *PLAIN[1:]]),
        BOTH,
        set(),
    ),
    "hidden in a folder": (
        lambda _: python_tar(
            [
                *[("train/.DS_Store", b"x"), ("train/._000.jpg", APPLE), ("train/000.jpg", IMAGE)],
                *[("train/._000.txt", APPLE), ("train/000.txt", b"cap 0")],
                *[("train/._001.jpg", APPLE), ("train/001.jpg", IMAGE)],
                *[("train/._001.txt", APPLE), ("train/001.txt", b"cap 1")],
            ]
        ),
        in_folder(BOTH, "train"),
        set(),
    ),
    "__MACOSX at the top": (
        lambda _: python_tar([("__MACOSX/000.jpg", APPLE), *PLAIN, ("__MACOSX/001.txt", APPLE)]),
        BOTH,
        set(),
    ),
    "__MACOSX in a folder": (
        lambda _: python_tar([*PLAIN[:1], ("a/__MACOSX/000.jpg", APPLE), *PLAIN[1:]]),
        BOTH,
        set(),
    ),
    "README between the files of a sample": (
        lambda _: python_tar([*PLAIN[:1], ("README", b"hello"), *PLAIN[1:]]),
        BOTH,
        set(),
    ),
    "LICENSE at the start": (lambda _: python_tar([("LICENSE", b"x"), *PLAIN]), BOTH, set()),
    "notes in a folder": (
        lambda _: python_tar([*PLAIN[:3], ("meta/notes", b"x"), *PLAIN[3:]]),
        BOTH,
        set(),
    ),
    "a hard link": (
        linked_tar,
        [("photos/000", IMAGE, "cap 0"), ("photos/001", None, "cap 1")],
        {"hard-link"},
    ),
    "hard links, as advised": (
        lambda folder: linked_tar(folder, "--hard-dereference"),
        in_folder(BOTH),
        set(),
    ),
    "a symbolic link": (
        symbolic_tar,
        [("photos/000", IMAGE, "cap 0"), ("photos/001", None, "cap 1")],
        {"hard-link"},
    ),
    "symbolic links, as advised": (
        lambda folder: symbolic_tar(folder, "-h", "--hard-dereference"),
        in_folder(BOTH),
        set(),
    ),
    "a link between the files of a sample": (
        lambda _: with_entries(("copy.jpg", tarfile.LNKTYPE, "000.jpg")),
        BOTH,
        {"hard-link"},
    ),
    "an image twice in a row": (
        lambda _: python_tar([PLAIN[0], ("000.jpg", image_bytes(2)), *PLAIN[1:]]),
        BOTH,
        {"repeated-file"},
    ),
    "a caption twice": (
        lambda _: python_tar([*PLAIN[:2], ("000.txt", b"other"), *PLAIN[2:]]),
        BOTH,
        {"repeated-file"},
    ),
    "a sample twice in a row": (
        lambda _: python_tar([*PLAIN[:2], *PLAIN[:2], *PLAIN[2:]]),
        BOTH,
        {"repeated-file"},
    ),
    "a sample again later": (
        lambda _: python_tar([*PLAIN, *PLAIN[:2]]),
        [*BOTH, *FIRST],
        set(),
    ),
    "files of a sample apart": (
        lambda _: python_tar([PLAIN[0], PLAIN[2], PLAIN[1], PLAIN[3]]),
        [
            ("000", IMAGE, None),
            ("001", IMAGE, None),
            ("000", None, "cap 0"),
            ("001", None, "cap 1"),
        ],
        {"separated"},
    ),
    "sorted names, as advised": (lambda _: python_tar(sorted(PLAIN)), BOTH, set()),
    "dots in names": (
        lambda _: python_tar([("a.b.jpg", IMAGE), ("a.b.txt", b"cap 0")]),
        [("a", None, None)],
        {"dotted-name"},
    ),
    "a caption without an image": (
        lambda _: python_tar(PLAIN[:3][1:]),
        [("000", None, "cap 0"), ("001", IMAGE, None)],
        {"no-image", "no-caption"},
    ),
    "a byte order mark": (
        lambda _: python_tar([("000.jpg", IMAGE), ("000.txt", b"\xef\xbb\xbfcap 0")]),
        FIRST,
        set(),
    ),
    "CRLF": (lambda _: python_tar([("000.jpg", IMAGE), ("000.txt", b"cap 0\r\n")]), FIRST, set()),
    "gzip under the name .tar": (lambda _: gzip.compress(python_tar(PLAIN)), [], {"compressed"}),
    "decompressed, as advised": (
        lambda _: gzip.decompress(gzip.compress(python_tar(PLAIN))),
        BOTH,
        set(),
    ),
    "concatenated archives": (
        lambda _: python_tar(PLAIN[:2]) + python_tar(PLAIN[2:]),
        FIRST,
        {"shard-damaged"},
    ),
    "joined by tar -A, as advised": (lambda folder: joined(folder), BOTH, set()),
    "an empty file": (
        lambda _: python_tar([("000.jpg", IMAGE), ("000.txt", b""), *PLAIN[2:]]),
        [("000", IMAGE, ""), ("001", IMAGE, "cap 1")],
        set(),
    ),
}


def joined(folder: Path) -> bytes:
    """Return two archives that GNU tar has joined."""
    for name, members in (("a.tar", PLAIN[:2]), ("b.tar", PLAIN[2:])):
        (folder / name).write_bytes(python_tar(members))
    subprocess.run(["tar", "-A", "-f", "a.tar", "b.tar"], cwd=folder, check=True)
    return (folder / "a.tar").read_bytes()


def found(key: str, members: Any) -> tuple[str, bytes | None, str | None]:
    image, text = members.get("jpg"), members.get("txt")
    caption = None if text is None else caption_text(memoryview(text))
    return key, None if image is None else bytes(image), caption


def indexed(path: Path) -> Iterator[tuple[str, bytes | None, str | None]]:
    """Yield the samples that the indexed reader finds."""
    scan, content = scan_tar(path), path.read_bytes()
    for start, stop in zip(scan.starts.tolist(), scan.stops.tolist(), strict=True):
        yield found(*sample_members(memoryview(content)[start:stop]))


def streamed(path: Path) -> tuple[Samples, list[str]]:
    """Return the samples that the reader `webdataset` finds, and its errors."""
    from sm_train.entrypoints.data_loading.webdataset_reader import _ReadErrors

    errors = _ReadErrors({str(path): 0}, {0: path.name})
    pipeline = webdataset.DataPipeline(
        lambda: iter([{"url": str(path)}]),
        errors.watch,
        *_sample_stages(errors.handle),
        errors.found,
    )
    samples = [found(sample["__key__"], sample) for sample in itertools.islice(pipeline, 100)]
    return samples, [str(error.content) for error in errors.taken()]


@pytest.mark.parametrize(("make", "expected", "reasons"), TARS.values(), ids=TARS)
def test_readers_and_index_agree(
    make: Make, expected: Samples, reasons: set[str], tmp_path: Path
) -> None:
    content = make(tmp_path)
    shutil.rmtree(tmp_path / "photos", ignore_errors=True)
    path = tmp_path / "shard.tar"
    path.write_bytes(content)
    described = describe_shard(path, path.name)
    damage = {item.reason for item in described.rejected}
    assert {*described.unusable, *damage} == reasons
    assert list(indexed(path)) == expected
    assert list(described.shard.keys) == [key for key, _, _ in expected]
    samples, errors = streamed(path)
    assert samples == expected
    assert bool(errors) == (reasons == {"compressed"})


def test_there_are_forty_tars() -> None:
    assert len(TARS) >= 40
