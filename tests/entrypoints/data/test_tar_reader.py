"""Samples are found in any tar, and damage costs only what it touches."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.data.tar_reader import (
    BLOCK,
    TarError,
    parse_header,
    sample_members,
    scan_tar,
    split_name,
)

Members = list[tuple[str, bytes]]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def write(path: Path, members: Members, kind: int = tarfile.USTAR_FORMAT) -> None:
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def read(path: Path) -> list[tuple[str, dict[str, bytes]]]:
    """Every sample that a walk finds, as the loader reads it."""
    content = memoryview(path.read_bytes())
    found = scan_tar(path)
    samples = []
    for start, stop in zip(found.starts.tolist(), found.stops.tolist(), strict=True):
        key, members = sample_members(content[start:stop])
        samples.append((key, {name: bytes(part) for name, part in members.items()}))
    return samples


def members(count: int, size: int = 700) -> Members:
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
@given(
    keys=st.lists(names, min_size=1, max_size=6),
    folder=st.sampled_from(["", "a/", "../", "/etc/", "x.y/", "deep/" * 40]),
    kind=st.sampled_from(FORMATS[1:]),
    sizes=st.lists(st.integers(0, 1500), min_size=6, max_size=6),
)
def test_a_walk_finds_what_tarfile_finds(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[str],
    folder: str,
    kind: int,
    sizes: list[int],
) -> None:
    """Whatever the names: long ones, with dots, spaces or line ends, twice, or leading outside."""
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write(
        path,
        [
            (f"{folder}{key}.{extension}", extension.encode() * size)
            for key, size in zip(keys, sizes, strict=False)
            for extension in ("jpg", "txt")
        ],
        kind,
    )
    with tarfile.open(path) as tar:
        theirs = [(split_name(one.name), tar.extractfile(one).read()) for one in tar]  # type: ignore[union-attr]
    samples = read(path)
    ours = [
        ((key, extension), content)
        for key, parts in samples
        for extension, content in parts.items()
    ]
    assert ours == theirs
    assert len(samples) == len(keys)
    assert scan_tar(path).damage == ()


def test_a_key_that_comes_twice_is_two_samples(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", members(1) + members(1) + members(2))
    assert [key for key, _ in read(tmp_path / "a.tar")] == ["0000", "0000", "0000", "0001"]


def test_odd_keys_and_paths_that_lead_outside_are_names_and_nothing_more(tmp_path: Path) -> None:
    odd = ["../../etc/passwd.jpg", "/root/x.jpg", "a.b/c.d.jpg", "./e..jpg", "~.jpg"]
    write(tmp_path / "a.tar", [(name, b"content") for name in odd])
    before = sorted(tmp_path.parent.iterdir())
    assert [(key, list(parts)) for key, parts in read(tmp_path / "a.tar")] == [
        ("../../etc/passwd", ["jpg"]),
        ("/root/x", ["jpg"]),
        ("a.b/c", ["d.jpg"]),
        ("./e", [".jpg"]),
        ("~", ["jpg"]),
    ]
    assert sorted(tmp_path.parent.iterdir()) == before


def test_folders_and_links_are_no_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            entry = tarfile.TarInfo(f"x{kind!r}.jpg")
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    assert read(tmp_path / "a.tar") == []


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("length", range(0, 12_000, 611))
def test_a_tar_cut_short_keeps_every_whole_sample(tmp_path: Path, length: int, kind: int) -> None:
    path = tmp_path / "a.tar"
    write(path, members(4), kind)
    whole = read(path)
    starts, stops = scan_tar(path).starts, scan_tar(path).stops
    path.write_bytes(path.read_bytes()[:length])
    found = scan_tar(path)
    kept = [sample for sample, stop in zip(whole, stops, strict=True) if stop <= length]
    cut = read(path)
    assert cut[: len(kept)] == kept
    # At most the image of the sample that the cut goes through is there too.
    assert len(cut) <= len(kept) + 1
    ended = length >= stops[-1] + BLOCK
    assert bool(found.damage) != ended
    assert "cut short" in "".join(found.damage) or ended
    assert set(found.starts) <= set(starts)


@pytest.mark.parametrize("sample", [0, 1, 3])
@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_checksum_loses_one_sample(tmp_path: Path, sample: int, part: int) -> None:
    path = tmp_path / "a.tar"
    write(path, members(4))
    whole = read(path)
    content = bytearray(path.read_bytes())
    # Three blocks a file: a header and 700 bytes.
    content[(2 * sample + part) * 3 * BLOCK + 148 : (2 * sample + part) * 3 * BLOCK + 150] = b"77"
    path.write_bytes(content)
    found = read(path)
    rest = [one for one in found if len(one[1]) == 2]
    assert rest == [one for number, one in enumerate(whole) if number != sample]
    [damage] = scan_tar(path).damage
    assert "the header is damaged" in damage


@pytest.mark.parametrize("content", [b"", bytes(512), bytes(1024), bytes(10240)])
def test_an_empty_tar_has_no_samples(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    found = scan_tar(tmp_path / "a.tar")
    assert len(found.starts) == 0
    assert bool(found.damage) == (not content)


@settings(max_examples=80, deadline=None)
@given(noise=st.binary(min_size=1, max_size=600), place=st.floats(0, 1, exclude_max=True))
def test_no_damage_breaks_a_walk(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: float
) -> None:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write(path, members(3))
    content = bytearray(path.read_bytes())
    start = int(len(content) * place)
    content[start : start + len(noise)] = noise
    path.write_bytes(content)
    found = scan_tar(path)
    assert (found.starts < found.stops).all()
    assert (found.starts[1:] >= found.stops[:-1]).all()
    for first, last in zip(found.starts.tolist(), found.stops.tolist(), strict=True):
        try:
            sample_members(memoryview(content)[first:last])
        except TarError as error:
            assert error.reason in ("tar-damaged", "tar-truncated")  # noqa: PT017


def test_files_beyond_eight_gibibytes_have_a_size() -> None:
    """GNU's base 256; none of our shards, but a header that must not be misread."""
    entry = tarfile.TarInfo("big.jpg")
    entry.size = 9 * 2**30
    header = parse_header(entry.tobuf(tarfile.GNU_FORMAT)[:BLOCK])
    assert header is not None
    assert header.size == 9 * 2**30


def test_a_sample_out_of_its_place_is_refused(tmp_path: Path) -> None:
    """As with an index of other shards: nothing is taken for a sample that is none."""
    write(tmp_path / "a.tar", members(2))
    content = memoryview((tmp_path / "a.tar").read_bytes())
    with pytest.raises(TarError, match="tar-damaged"):
        sample_members(content[7 * BLOCK : 9 * BLOCK])
    with pytest.raises(TarError, match="tar-truncated"):
        sample_members(content[: 2 * BLOCK])
    with pytest.raises(TarError, match="tar-truncated"):
        sample_members(content[:100])
