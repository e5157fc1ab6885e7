"""Shards and their index: what other tools read in them, and what a damage looks like."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
import webdataset
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.data.shard_format import END_MARK, Shard, ShardError
from sm_train.entrypoints.data.shard_verification import scan_shard, verify_shard
from sm_train.entrypoints.packing.plan import sample_key
from sm_train.entrypoints.packing.shard_writer import ShardWriter, sample_parts
from sm_train.entrypoints.packing.storage import LocalFolder

DIGEST = blake3(b"").hexdigest()


def sample(number: int, image: bytes, caption: str = "a caption", kind: str = "jpeg") -> bytes:
    return b"".join(sample_parts(sample_key(number), image, caption, kind, b'{"width": 48}'))


def write(folder: Path, samples: list[bytes], name: str = "shard-000000.tar") -> Shard:
    with LocalFolder(folder).atomic_writer(name) as sink, ShardWriter(sink, name) as file:
        for number, each in enumerate(samples):
            file.append(sample_key(number), each)
        return file.finish()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard of three samples."""
    write(tmp_path, [sample(n, bytes([n]) * 700, f"caption {n}") for n in range(3)])
    return tmp_path / "shard-000000.tar"


def test_webdataset_reads_the_original_bytes_the_caption_and_the_facts(tmp_path: Path) -> None:
    images = [b"first" * 300, b"second", b"third" * 99]
    kinds = ["jpeg", "png", "webp"]
    write(tmp_path, [sample(n, images[n], "größer 猫", kinds[n]) for n in range(3)])
    read = list(webdataset.WebDataset(str(tmp_path / "shard-000000.tar"), shardshuffle=False))
    assert [each["__key__"] for each in read] == ["000000000", "000000001", "000000002"]
    assert [read[0]["jpg"], read[1]["png"], read[2]["webp"]] == images
    assert {each["txt"].decode() for each in read} == {"größer 猫"}
    assert json.loads(read[1]["json"]) == {"width": 48}


def test_tar_lists_a_sample_as_image_caption_facts(shard: Path) -> None:
    listed = subprocess.run(["tar", "-tf", shard], capture_output=True, text=True, check=True)
    assert listed.stderr == ""
    assert listed.stdout.split() == [
        f"00000000{number}.{extension}"
        for number in range(3)
        for extension in ("jpg", "txt", "json")
    ]


def test_bytes_do_not_depend_on_who_writes_when(shard: Path) -> None:
    with tarfile.open(shard) as tar:
        members = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar}
    assert members == {(0, 0, 0, "", "", 0o644)}


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="ascii"), max_size=120), st.integers(0, 3000))
def test_a_header_is_the_one_that_tarfile_writes(name: str, size: int) -> None:
    """Ours is made without it, which is ten times quicker."""
    info = tarfile.TarInfo(f"{name}.jpg")
    info.size = size
    if "/" in name or "\0" in name or len(info.name) > 100:
        return  # names of ours have neither
    header, *_ = sample_parts(name, bytes(size), "", "jpeg", b"")
    assert header == info.tobuf(tarfile.USTAR_FORMAT)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=10))
def test_offsets_cut_out_exactly_one_sample_each(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        shard = write(Path(name), [sample(n, bytes(size)) for n, size in enumerate(sizes)])
        content = (Path(name) / shard.name).read_bytes()
    assert content[shard.offsets[-1] :] == END_MARK
    for key, start, end in zip(shard.keys, shard.offsets[:-1], shard.offsets[1:], strict=True):
        with tarfile.open(fileobj=io.BytesIO(content[start:end] + END_MARK)) as tar:
            assert tar.getnames() == [f"{key}.jpg", f"{key}.txt", f"{key}.json"]


def test_scanning_finds_what_the_writer_wrote(tmp_path: Path) -> None:
    shard = write(tmp_path, [sample(n, bytes(n * 100)) for n in range(20)])
    assert scan_shard(tmp_path / shard.name) == shard
    assert shard.blake3 == blake3((tmp_path / shard.name).read_bytes()).hexdigest()
    verify_shard(tmp_path / shard.name, shard)


def test_an_error_leaves_nothing_of_the_shard(tmp_path: Path) -> None:
    def broken() -> None:
        with (
            LocalFolder(tmp_path).atomic_writer("a.tar") as sink,
            ShardWriter(sink, "a.tar") as file,
        ):
            file.append("000000000", sample(0, bytes(3000)))
            assert list(tmp_path.glob("*.tar")) == []  # not before it is whole
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert list(tmp_path.iterdir()) == []


# A member is 512 bytes of header and content padded to 512; the second sample's image has
# its header at 3584 and its content of 700 bytes from 4096 to 4796, padded to 5120.
@pytest.mark.parametrize(
    ("length", "words"),
    [
        (0, "offset 0: at the start"),
        (100, "offset 0: at the start"),
        (3584, "offset 3584: after 000000000.json"),
        (3584 + 100, "offset 3584: after 000000000.json"),
        (4096, "offset 3584: after 000000000.json: 000000001.jpg is cut short"),
        (4500, "offset 3584: after 000000000.json: 000000001.jpg is cut short"),
        (4900, "offset 3584: after 000000000.json: 000000001.jpg is cut short"),
        (10752, "offset 10752: after 000000002.json: cut short, the end mark is missing"),
        (10752 + 512, "offset 10752: after 000000002.json: cut short, the end mark is incomplete"),
    ],
)
def test_a_tar_cut_short_is_one_line_with_file_place_and_sample(
    shard: Path, length: int, words: str
) -> None:
    content = shard.read_bytes()
    assert len(content) == 10752 + 1024
    shard.write_bytes(content[:length])
    for walk in (scan_shard, verify_shard):
        with pytest.raises(ShardError) as error:
            walk(shard)
        assert str(error.value).startswith(f"{shard}: {words}")
        assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_a_shard_error_and_nothing_else(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "shard-000000.tar"
        intact = write(Path(name), [sample(0, b"image" * 50), sample(1, b"other")])
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(ShardError, match="shard-000000"):
            verify_shard(path, intact)


def test_damage_in_a_header_is_placed(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    content[3584] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ShardError, match=r"offset 3584: after 000000000\.json: .*damaged"):
        verify_shard(shard)


def test_a_tar_of_another_writer_is_described_too(tmp_path: Path) -> None:
    """Folders, PAX headers for long names, dots in extensions, members apart from files."""
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


def test_a_member_twice_in_a_sample_is_an_error(tmp_path: Path) -> None:
    encoded = sample(0, b"image")
    path = tmp_path / "twice.tar"
    path.write_bytes(encoded + encoded + END_MARK)
    with pytest.raises(ShardError, match=r"000000000\.jpg is in its sample twice"):
        scan_shard(path)


def test_a_text_file_is_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "notes.tar"
    path.write_text("not a tar at all" * 100)
    with pytest.raises(ShardError, match=r"notes\.tar: offset 0"):
        verify_shard(path)


def test_the_format_needs_nothing_but_its_digest() -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import sm_train.entrypoints.packing.shard_writer\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names - {'sm_train'}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "['blake3']\n"
