"""Verification: every fault of a shard is one line with its file, its offset and its sample."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.shards.shard_format import END_MARK, ShardError
from sm_train.entrypoints.shards.shard_verification import scan_shard, verify_shard

from tests.support.shard_files import encoded_sample, write_packed_shard


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard of three samples."""
    write_packed_shard(tmp_path, [encoded_sample(n, bytes([n]) * 700) for n in range(3)])
    return tmp_path / "shard-000000.tar"


def test_scan_finds_what_the_writer_wrote(tmp_path: Path) -> None:
    written = write_packed_shard(tmp_path, [encoded_sample(n, bytes(n * 100)) for n in range(20)])
    path = tmp_path / written.name
    assert scan_shard(path) == written
    assert written.blake3 == blake3(path.read_bytes()).hexdigest()
    verify_shard(path, written)


# A member is 512 bytes of header and content padded to 512. The second sample's image has its
# header at 3584 and its content of 700 bytes from 4096 to 4796, padded to 5120.
@pytest.mark.parametrize(
    ("length", "fault"),
    [
        (0, "offset 0: at the start: cut short, the end mark is missing"),
        (100, "offset 0: at the start: cut short, the end mark is missing"),
        (3584, "offset 3584: after 000000000.json: cut short, the end mark is missing"),
        (3584 + 100, "offset 3584: after 000000000.json: cut short, the end mark is missing"),
        (4096, "offset 3584: after 000000000.json: 000000001.jpg is cut short"),
        (4500, "offset 3584: after 000000000.json: 000000001.jpg is cut short"),
        (4900, "offset 3584: after 000000000.json: 000000001.jpg is cut short"),
        (10752, "offset 10752: after 000000002.json: cut short, the end mark is missing"),
        (10752 + 512, "offset 10752: after 000000002.json: cut short, the end mark is incomplete"),
    ],
)
def test_truncation_names_file_offset_and_sample(shard: Path, length: int, fault: str) -> None:
    content = shard.read_bytes()
    assert len(content) == 10752 + 1024
    shard.write_bytes(content[:length])
    for check in (scan_shard, verify_shard):
        with pytest.raises(ShardError) as error:
            check(shard)
        assert str(error.value) == f"{shard}: {fault}"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_changed_byte_is_a_shard_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shard-000000.tar"
        samples = [encoded_sample(0, b"image" * 50), encoded_sample(1, b"other")]
        intact = write_packed_shard(Path(folder), samples)
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(ShardError, match="shard-000000"):
            verify_shard(path, intact)


def test_damaged_header_names_its_offset(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[3584] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        ShardError, match=r"offset 3584: after 000000000\.json: the header is damaged"
    ):
        verify_shard(shard)


def test_damaged_end_mark_is_an_error(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[-1] = 1
    shard.write_bytes(content)
    with pytest.raises(ShardError, match=r"offset 10752: .*: damaged end mark"):
        verify_shard(shard)


def test_tar_of_another_writer_is_described(tmp_path: Path) -> None:
    """Folders, pax headers for long names, dots in extensions, members that are not files."""
    long = "x" * 150
    names = ["a/one.jpg", "a/one.seg.png", "b/one.jpg", f"b/{long}.jpg", f"b/{long}.txt"]
    path = tmp_path / "foreign.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 10
            tar.addfile(info, io.BytesIO(b"0123456789"))
    shard = scan_shard(path)
    assert shard.keys == ("a/one", "b/one", f"b/{long}")
    content = path.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content[shard.offsets[2] : shard.offsets[3]])) as tar:
        assert tar.getnames() == names[3:]


def test_repeated_member_in_a_sample_is_an_error(tmp_path: Path) -> None:
    encoded = encoded_sample(0, b"image")
    path = tmp_path / "twice.tar"
    path.write_bytes(encoded + encoded + END_MARK)
    with pytest.raises(
        ShardError, match=rf"offset {len(encoded)}: 000000000\.jpg is in its sample twice"
    ):
        scan_shard(path)


def test_absurd_size_is_an_error(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("huge.jpg")
    entry.size = 2**80
    path = tmp_path / "huge.tar"
    path.write_bytes(entry.tobuf(tarfile.GNU_FORMAT) + END_MARK)
    with pytest.raises(ShardError, match=r"huge\.tar: offset 0: at the start: huge\.jpg is cut"):
        verify_shard(path)


def test_text_file_is_not_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "notes.tar"
    path.write_text("not a tar at all" * 100)
    with pytest.raises(ShardError, match=r"notes\.tar: offset 0"):
        verify_shard(path)
