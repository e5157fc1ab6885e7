"""The shard format: what other tools read in our shards."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.entrypoints.shards.shard_format import END_MARK
from sm_train.entrypoints.shards.shard_writer import ShardWriter, sample_parts
from sm_train.entrypoints.storage.storage import LocalFolder

from tests.support.shard_files import encoded_sample, write_packed_shard


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A shard of three samples."""
    write_packed_shard(tmp_path, [encoded_sample(n, bytes([n]) * 700) for n in range(3)])
    return tmp_path / "shard-000000.tar"


def test_webdataset_reads_image_caption_and_metadata(tmp_path: Path) -> None:
    images = [b"first" * 300, b"second", b"third" * 99]
    formats = ["jpeg", "png", "webp"]
    write_packed_shard(
        tmp_path, [encoded_sample(n, images[n], "größer 猫", formats[n]) for n in range(3)]
    )
    samples = list(webdataset.WebDataset(str(tmp_path / "shard-000000.tar"), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == ["000000000", "000000001", "000000002"]
    assert [samples[0]["jpg"], samples[1]["png"], samples[2]["webp"]] == images
    assert {sample["txt"].decode() for sample in samples} == {"größer 猫"}
    assert json.loads(samples[1]["json"]) == {"width": 48}


def test_gnu_tar_lists_image_caption_and_metadata_in_order(shard: Path) -> None:
    listing = subprocess.run(["tar", "-tf", shard], capture_output=True, text=True, check=True)
    assert listing.stderr == ""
    assert listing.stdout.split() == [
        f"00000000{number}.{extension}"
        for number in range(3)
        for extension in ("jpg", "txt", "json")
    ]


def test_headers_have_no_time_and_no_user(shard: Path) -> None:
    with tarfile.open(shard) as tar:
        headers = {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar}
    assert headers == {(0, 0, 0, "", "", 0o644)}


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="ascii"), max_size=120), st.integers(0, 3000))
def test_headers_equal_those_of_tarfile(name: str, size: int) -> None:
    """The writer builds headers without tarfile, which is ten times faster."""
    info = tarfile.TarInfo(f"{name}.jpg")
    info.size = size
    if "/" in name or "\0" in name or len(info.name) > 100:
        return  # never in our names
    header, *_ = sample_parts(name, bytes(size), "", "jpeg", b"")
    assert header == info.tobuf(tarfile.USTAR_FORMAT)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=10))
def test_offsets_delimit_one_sample_each(sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        samples = [encoded_sample(number, bytes(size)) for number, size in enumerate(sizes)]
        shard = write_packed_shard(Path(folder), samples)
        content = (Path(folder) / shard.name).read_bytes()
    assert content[shard.offsets[-1] :] == END_MARK
    for key, start, stop in zip(shard.keys, shard.offsets[:-1], shard.offsets[1:], strict=True):
        with tarfile.open(fileobj=io.BytesIO(content[start:stop] + END_MARK)) as tar:
            assert tar.getnames() == [f"{key}.jpg", f"{key}.txt", f"{key}.json"]


def test_failed_writer_leaves_no_file(tmp_path: Path) -> None:
    def fail_while_writing() -> None:
        with (
            LocalFolder(tmp_path).atomic_writer("a.tar") as sink,
            ShardWriter(sink, "a.tar") as file,
        ):
            file.append("000000000", encoded_sample(0, bytes(3000)))
            assert list(tmp_path.glob("*.tar")) == []  # not before it is complete
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_while_writing()
    assert list(tmp_path.iterdir()) == []


def test_writer_depends_on_nothing_but_the_digest() -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import sm_train.entrypoints.shards.shard_writer\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names - {'sm_train'}))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "['blake3']\n"
