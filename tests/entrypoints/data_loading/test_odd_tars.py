"""Tars that other programs write: read as webdataset reads them, or refused with the reason."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import webdataset
from sm_train.entrypoints.data_prep.packing.describe_shard import describe_shard
from sm_train.entrypoints.shards.tar_reader import TarError, sample_members, scan_tar

from tests.support.cluster.training_jobs import png

SAMPLES = {
    f"{n:03}.{end}": png(n) if end == "png" else b"text" for n in range(3) for end in ("png", "txt")
}


def write(path: Path, files: dict[str, bytes], **options: int) -> Path:
    with tarfile.open(path, "w", **options) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def own_samples(path: Path) -> dict[str, dict[str, bytes]]:
    """Return the files of each sample as the indexed reader reads them, by its offsets."""
    content = path.read_bytes()
    description = describe_shard(path, path.name)
    found = {}
    offsets = description.shard.offsets
    for start, stop in pairwise(offsets):
        key, members = sample_members(memoryview(content)[start:stop])
        found[key] = {name: bytes(data) for name, data in members.items()}
    return found


def streamed_samples(path: Path) -> dict[str, dict[str, bytes]]:
    """Return the files of each sample as webdataset reads them."""
    pipeline = webdataset.DataPipeline(
        webdataset.SimpleShardList([str(path)]), webdataset.tarfile_to_samples()
    )
    return {
        sample["__key__"]: {name: data for name, data in sample.items() if name[:2] != "__"}
        for sample in pipeline
    }


def expected() -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for name, content in SAMPLES.items():
        key, _, extension = name.partition(".")
        found.setdefault(key, {})[extension] = content
    return found


def with_attributes(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return files as macOS's tar writes them: each after one with its attributes."""
    found: dict[str, bytes] = {}
    for name, content in files.items():
        found |= {f"./._{name}": b"\0\5\x16\7" + bytes(100), f"./{name}": content}
    return found


def test_files_with_attributes_of_macos_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", with_attributes(SAMPLES))
    own = {key.removeprefix("./"): files for key, files in own_samples(path).items()}
    streamed = {key.removeprefix("./"): files for key, files in streamed_samples(path).items()}
    assert own == streamed == expected()
    description = describe_shard(path, "a.tar")
    assert (description.unusable, description.rejected) == ({}, ())


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_are_read_in_every_format(tmp_path: Path, format_: int) -> None:
    folder = "folder-" * 12
    files = {f"{folder}/{name}": content for name, content in SAMPLES.items()}
    path = write(tmp_path / "a.tar", files, format=format_)
    assert own_samples(path) == streamed_samples(path)
    assert list(own_samples(path)) == [f"{folder}/{key}" for key in expected()]


def test_sizes_in_pax_headers_count(tmp_path: Path) -> None:
    """The size in the header itself is 0, as for files of more than 8 GiB."""
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        for name, content in SAMPLES.items():
            member = tarfile.TarInfo(name)
            record = f" size={len(content)}\n"
            length = len(record) + 2
            pax = f"{length}{record}".encode()
            assert len(pax) == length
            extension = tarfile.TarInfo("PaxHeaders/x")
            extension.type, extension.size = tarfile.XHDTYPE, len(pax)
            for header, data in ((extension, pax), (member, content)):
                file.write(header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
        file.write(bytes(1024))
    assert own_samples(path) == streamed_samples(path) == expected()


@pytest.mark.parametrize("format_", ["gnu", "posix"])
@pytest.mark.parametrize("holes", [1, 40])
def test_sparse_files_are_refused_with_the_reason(tmp_path: Path, format_: str, holes: int) -> None:
    """Also with maps that need blocks of their own; files after them are found."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in SAMPLES.items():
        (folder / name).write_bytes(content)
    with (folder / "001.png").open("wb") as file:
        for number in range(holes):
            file.seek((2 * number + 1) << 16)
            file.write(bytes([7]) * 4096)
    names = sorted(SAMPLES)
    path = tmp_path / "a.tar"
    subprocess.run(
        ["tar", "--sparse", f"--format={format_}", "-cf", path, *names], cwd=folder, check=True
    )
    scan = scan_tar(path, ("png",))
    if not scan.sparse:
        pytest.skip("this file system has no holes")
    assert [name.rpartition("/")[2] for name in scan.sparse] == ["001.png"]
    description = describe_shard(path, "a.tar")
    assert description.unusable["sparse"].count == 1
    assert "001.png" in description.unusable["sparse"].first[0]
    assert scan.damage == ()
    own = own_samples(path)
    assert {key: own[key] for key in ("000", "002")} == {
        key: files for key, files in expected().items() if key != "001"
    }


def test_a_sparse_file_within_a_sample_is_no_file_of_it() -> None:
    member = tarfile.TarInfo("a.png")
    member.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(TarError, match=r"tar-sparse: a\.png is stored sparsely"):
        sample_members(memoryview(member.tobuf(tarfile.GNU_FORMAT)))


@pytest.mark.parametrize("padding", [0, 9 * 1024])
def test_a_second_archive_in_a_file_is_reported(tmp_path: Path, padding: int) -> None:
    """As webdataset does, the first end mark ends the shard, but not without a word."""
    path = write(tmp_path / "a.tar", SAMPLES)
    other = write(tmp_path / "b.tar", {"x.png": png(9), "x.txt": b"text"})
    path.write_bytes(path.read_bytes() + bytes(padding) + other.read_bytes())
    assert own_samples(path) == streamed_samples(path) == expected()
    [rejected] = describe_shard(path, "a.tar").rejected
    assert "another archive follows the end mark, and is not read" in rejected.detail


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_shards_are_named(tmp_path: Path, compress: object) -> None:
    assert callable(compress)
    path = write(tmp_path / "a.tar", SAMPLES)
    path.write_bytes(compress(path.read_bytes()))
    description = describe_shard(path, "a.tar")
    assert list(description.unusable) == ["compressed"]
    assert description.rejected == ()
    assert description.shard.samples == 0


def test_offsets_of_samples_after_hidden_files_are_contiguous(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", with_attributes(SAMPLES))
    offsets = np.array(describe_shard(path, "a.tar").shard.offsets)
    assert (np.diff(offsets) > 0).all()
    assert len(offsets) == 4
