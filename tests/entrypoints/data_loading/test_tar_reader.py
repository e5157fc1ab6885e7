"""The tar reader: finds samples in any tar, and damage costs only what it touches."""

from __future__ import annotations

import io
import tarfile
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.shards.tar_reader import (
    BLOCK,
    TarError,
    is_skipped,
    parse_header,
    sample_members,
    scan_tar,
    split_name,
)

Members = list[tuple[str, bytes]]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def write_tar(path: Path, members: Members, tar_format: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def read_samples(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Return every sample that a scan finds, read as the loader does."""
    content = memoryview(path.read_bytes())
    scan = scan_tar(path)
    samples = []
    for start, stop in zip(scan.starts.tolist(), scan.stops.tolist(), strict=True):
        key, members = sample_members(content[start:stop])
        samples.append((key, {name: bytes(data) for name, data in members.items()}))
    return samples


def pairs(count: int, size: int = 700) -> Members:
    """Return the members of ``count`` samples: image and caption."""
    return [
        (f"{number:04d}.{extension}", bytes([number]) * size)
        for number in range(count)
        for extension in ("jpg", "txt")
    ]


names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]),
    min_size=1,
    max_size=70,
)


@settings(max_examples=60, deadline=None)
@example(keys=[".", "a"], folder="", tar_format=tarfile.GNU_FORMAT, sizes=[0, 9])
@given(
    keys=st.lists(names, min_size=1, max_size=6),
    folder=st.sampled_from(["", "a/", "../", "/etc/", "x.y/", "deep/" * 40]),
    tar_format=st.sampled_from(FORMATS[1:]),
    sizes=st.lists(st.integers(0, 1500), min_size=6, max_size=6),
)
def test_scan_agrees_with_tarfile(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[str],
    folder: str,
    tar_format: int,
    sizes: list[int],
) -> None:
    """For long names, names with dots, spaces or line ends, repeated, hidden and outside ones.

    Of a key that follows itself the first sample counts.
    """
    keys = [key for key, _ in groupby(keys)]
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write_tar(
        path,
        [
            (f"{folder}{key}.{extension}", extension.encode() * size)
            for key, size in zip(keys, sizes, strict=False)
            for extension in ("jpg", "txt")
        ],
        tar_format,
    )
    with tarfile.open(path) as tar:
        expected = [
            (split_name(member.name), tar.extractfile(member).read())  # type: ignore[union-attr]
            for member in tar
            if not is_skipped(member.name)
        ]
    samples = read_samples(path)
    members = [
        ((key, extension), content)
        for key, sample in samples
        for extension, content in sample.items()
    ]
    assert members == expected
    assert len(samples) == sum(not key.startswith(".") for key in keys)
    assert scan_tar(path).damage == ()


def test_of_files_that_a_sample_has_twice_the_first_counts(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [*pairs(1), *pairs(1), *pairs(2), *pairs(1)])
    keys = [key for key, _ in read_samples(tmp_path / "a.tar")]
    assert keys == ["0000", "0001", "0000"]
    scan = scan_tar(tmp_path / "a.tar")
    assert scan.repeated == ("0000.jpg", "0000.txt", "0000.jpg", "0000.txt")


def test_outside_paths_are_only_names(tmp_path: Path) -> None:
    paths = ["../../etc/passwd.jpg", "/root/x.jpg", "a.b/c.d.jpg", "./e..jpg", "~.jpg"]
    write_tar(tmp_path / "a.tar", [(name, b"content") for name in paths])
    before = sorted(tmp_path.parent.iterdir())
    assert [(key, list(members)) for key, members in read_samples(tmp_path / "a.tar")] == [
        ("../../etc/passwd", ["jpg"]),
        ("/root/x", ["jpg"]),
        ("a.b/c", ["d.jpg"]),
        ("./e", [".jpg"]),
        ("~", ["jpg"]),
    ]
    assert sorted(tmp_path.parent.iterdir()) == before


def test_folders_and_links_are_not_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for typeflag in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            entry = tarfile.TarInfo(f"x{typeflag!r}.jpg")
            entry.type, entry.linkname = typeflag, "/etc/passwd"
            tar.addfile(entry)
    assert read_samples(tmp_path / "a.tar") == []


@pytest.mark.parametrize("tar_format", FORMATS)
@pytest.mark.parametrize("length", range(0, 12_000, 611))
def test_truncated_tar_keeps_every_complete_sample(
    tmp_path: Path, length: int, tar_format: int
) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, pairs(4), tar_format)
    intact = read_samples(path)
    starts, stops = scan_tar(path).starts, scan_tar(path).stops
    path.write_bytes(path.read_bytes()[:length])
    scan = scan_tar(path)
    complete = [sample for sample, stop in zip(intact, stops, strict=True) if stop <= length]
    samples = read_samples(path)
    assert samples[: len(complete)] == complete
    # At most the image of the sample that was cut is left, too.
    assert len(samples) <= len(complete) + 1
    has_end_mark = length >= stops[-1] + BLOCK
    assert bool(scan.damage) != has_end_mark
    assert "cut short" in "".join(scan.damage) or has_end_mark
    assert set(scan.starts) <= set(starts)


@pytest.mark.parametrize("sample", [0, 1, 3])
@pytest.mark.parametrize("member", [0, 1])
def test_wrong_checksum_loses_one_sample(tmp_path: Path, sample: int, member: int) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, pairs(4))
    intact = read_samples(path)
    content = bytearray(path.read_bytes())
    # A member is three blocks: a header and 700 bytes.
    checksum = (2 * sample + member) * 3 * BLOCK + 148
    content[checksum : checksum + 2] = b"77"
    path.write_bytes(content)
    complete = [found for found in read_samples(path) if len(found[1]) == 2]
    assert complete == [found for number, found in enumerate(intact) if number != sample]
    [damage] = scan_tar(path).damage
    assert "the header is damaged" in damage


@pytest.mark.parametrize("content", [b"", bytes(512), bytes(1024), bytes(10240)])
def test_empty_tar_has_no_samples(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    scan = scan_tar(tmp_path / "a.tar")
    assert len(scan.starts) == 0
    assert bool(scan.damage) == (not content)


@settings(max_examples=80, deadline=None)
@given(noise=st.binary(min_size=1, max_size=600), position=st.floats(0, 1, exclude_max=True))
def test_scan_survives_any_damage(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, position: float
) -> None:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write_tar(path, pairs(3))
    content = bytearray(path.read_bytes())
    start = int(len(content) * position)
    content[start : start + len(noise)] = noise
    path.write_bytes(content)
    scan = scan_tar(path)
    assert (scan.starts < scan.stops).all()
    assert (scan.starts[1:] >= scan.stops[:-1]).all()
    for start, stop in zip(scan.starts.tolist(), scan.stops.tolist(), strict=True):
        try:
            sample_members(memoryview(content)[start:stop])
        except TarError as error:
            assert error.reason in ("tar-damaged", "tar-truncated")  # noqa: PT017


def test_sizes_above_eight_gibibytes_are_parsed() -> None:
    """GNU stores them in base 256. Our shards have none, but such a header must not be misread."""
    entry = tarfile.TarInfo("big.jpg")
    entry.size = 9 * 2**30
    header = parse_header(entry.tobuf(tarfile.GNU_FORMAT)[:BLOCK])
    assert header is not None
    assert header.size == 9 * 2**30


def test_absurd_size_is_truncation(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("huge.jpg")
    entry.size = 2**80
    (tmp_path / "a.tar").write_bytes(entry.tobuf(tarfile.GNU_FORMAT) + bytes(3 * BLOCK))
    assert scan_tar(tmp_path / "a.tar").damage == ("offset 0: at the start: huge.jpg is cut short",)


def test_wrong_offsets_raise(tmp_path: Path) -> None:
    """With the index of other shards, arbitrary bytes are never mistaken for a sample."""
    write_tar(tmp_path / "a.tar", pairs(2))
    content = memoryview((tmp_path / "a.tar").read_bytes())
    with pytest.raises(TarError, match="tar-damaged"):
        sample_members(content[7 * BLOCK : 9 * BLOCK])
    with pytest.raises(TarError, match="tar-truncated"):
        sample_members(content[: 2 * BLOCK])
    with pytest.raises(TarError, match="tar-truncated"):
        sample_members(content[:100])
