"""``sm-train pack``: what comes out, how often, and what is said about it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st
from sm_train.entrypoints.data.shard_format import Shard
from sm_train.entrypoints.data.shard_index import ShardIndex, write_index
from sm_train.entrypoints.data.shard_verification import verify_shard
from sm_train.entrypoints.packing.storage import LocalFolder
from sm_train.entrypoints.packing.worker_pool import PackProgress
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.pack import PackJob, PackResult, pack, parse_size
from sm_train.toolkit.packing.report import pack_summary

from tests.conftest import Cli, clean_environment
from tests.support.image_files import album, picture, tree, write_pair


def samples(destination: Path) -> list[dict[str, bytes]]:
    """What a training job would read, in the order of the shards."""
    urls = [str(path) for path in sorted((destination / "shards").iterdir())]
    return list(webdataset.WebDataset(urls, shardshuffle=False))


def test_a_folder_becomes_shards_and_an_index_beside_them(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 7)
    run = cli("pack", "in", "out", "--shard-size", "6KB", "--json")
    assert run.returncode == 0
    result = json.loads(run.stdout)
    index = ShardIndex(tmp_path / "out" / "index.parquet")
    assert result == {
        "shards": len(index),
        "samples": 7,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "out/shards").iterdir()),
        "rejected": {},
        "index": "out/index.parquet",
        "shards_path": "out/shards",
    }
    assert len(index) > 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["index.parquet", "shards"]
    assert [path.name for path in sorted((tmp_path / "out/shards").iterdir())] == [*index.names]
    for number, name in enumerate(index.names):
        verify_shard(tmp_path / "out/shards" / name, index.shard(number))


def test_images_keep_their_bytes_and_are_numbered_by_path(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 5)
    assert cli("pack", "in", "out").returncode == 0
    read = samples(tmp_path / "out")
    sources = ["000.jpg", "001.jpg", "003.jpg", "004.jpg", "more/002.jpg"]
    assert [json.loads(each["json"])["source"] for each in read] == sources
    assert [each["jpg"] for each in read] == [
        (tmp_path / "in" / source).read_bytes() for source in sources
    ]
    assert [each["txt"].decode() for each in read] == [f"picture {n}" for n in (0, 1, 3, 4, 2)]
    assert [each["__key__"] for each in read] == [f"{n:09d}" for n in range(5)]


def test_formats_are_told_by_content_and_measured(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_pair(folder, "a.JPEG", picture(size=(60, 40)), "a")
    write_pair(folder, "b.png", picture(size=(10, 20), kind="PNG"), "b")
    write_pair(folder, "c.webp", picture(size=(30, 30), kind="WEBP"), "c")
    write_pair(folder, "d.jpg", picture(size=(5, 6), kind="PNG"), "a PNG by another name")
    write_pair(folder, "e.jpg", picture(size=(8, 8), kind="MPO"), "a telephone's JPEG")
    assert cli("pack", "in", "out").returncode == 0
    read = samples(tmp_path / "out")
    facts = [json.loads(each["json"]) for each in read]
    assert [(f["width"], f["height"], f["format"]) for f in facts] == [
        (60, 40, "jpeg"),
        (10, 20, "png"),
        (30, 30, "webp"),
        (5, 6, "png"),
        (8, 8, "jpeg"),
    ]
    extensions = [next(iter({"jpg", "png", "webp"} & each.keys())) for each in read]
    assert extensions == ["jpg", "png", "webp", "png", "jpg"]


def test_captions_lose_the_white_space_and_byte_order_mark_around_them(
    cli: Cli, tmp_path: Path
) -> None:
    write_pair(tmp_path / "in", "a.jpg", picture(), b"\xef\xbb\xbf  two\nlines, gr\xc3\xbcn \r\n")
    assert cli("pack", "in", "out").returncode == 0
    [only] = samples(tmp_path / "out")
    assert only["txt"].decode() == "two\nlines, grün"


def test_linked_images_and_folders_are_packed_once(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "elsewhere", 2)
    write_pair(tmp_path / "in", "a.jpg", picture(9), "a")
    (tmp_path / "in" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    assert cli("pack", "in", "out").returncode == 0
    sources = [json.loads(each["json"])["source"] for each in samples(tmp_path / "out")]
    assert sources == ["a.jpg", "linked/000.jpg", "linked/001.jpg"]


def test_the_same_input_gives_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    """Whatever the number of workers, the place and the files' times."""
    album(tmp_path / "in", 24)
    write_pair(tmp_path / "in", "005.jpg", picture(5)[:400], "cut")
    write_pair(tmp_path / "in", "013.jpg", b"", "empty")
    write_pair(tmp_path / "in", "015.png", b"no image", "nonsense")
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.jpg"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    for source, destination, workers in [("in", "one", 1), ("in", "three", 3), ("copy", "far", 2)]:
        run = cli("pack", source, destination, "--shard-size", "9KB", "--workers", str(workers))
        assert run.returncode == 0
    packed = tree(tmp_path / "one")
    assert len(packed) > 4
    assert tree(tmp_path / "three") == packed
    assert tree(tmp_path / "far") == packed


def test_packing_again_does_nothing(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 3)
    first = cli("pack", "in", "out", "--json")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = cli("pack", "in", "out", "--json")
    assert again.returncode == 0
    assert "already packed 3 samples" in again.stderr
    assert again.stdout == first.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == times


def _other_size(folder: Path) -> list[str]:
    return ["--shard-size", "5KB"]


def _new_image(folder: Path) -> list[str]:
    write_pair(folder, "new.jpg", picture(99), "new")
    return []


def _lost_caption(folder: Path) -> list[str]:
    (folder / "000.txt").unlink()
    return []


def _edited_caption_of_equal_length(folder: Path) -> list[str]:
    caption = folder / "000.txt"
    caption.write_text(caption.read_text()[::-1])
    later = caption.stat().st_mtime + 60
    os.utime(caption, (later, later))
    return []


@pytest.mark.parametrize(
    "change", [_other_size, _new_image, _lost_caption, _edited_caption_of_equal_length]
)
def test_another_pack_is_not_overwritten(cli: Cli, tmp_path: Path, change: object) -> None:
    album(tmp_path / "in", 3)
    assert cli("pack", "in", "out").returncode == 0
    before = tree(tmp_path / "out")
    assert callable(change)
    run = cli("pack", "in", "out", *change(tmp_path / "in"))
    assert run.returncode == 2
    assert run.stderr.startswith("sm-train: out: ")
    assert run.stderr.count("\n") == 1
    assert tree(tmp_path / "out") == before


def test_an_image_that_changes_while_it_is_packed_is_noticed_later(tmp_path: Path) -> None:
    """The index is newer than the change, and yet does not know of it."""
    album(tmp_path / "in", 4)
    places = str(tmp_path / "in"), str(tmp_path / "out")
    job = PackJob(*places, None, 10**6, "image", "caption", workers=1)

    def touch_the_first(tally: PackProgress) -> None:
        os.utime(tmp_path / "in/000.jpg", ns=(0, time.time_ns()))

    pack(job, touch_the_first)
    with pytest.raises(UserError, match="has changed since"):
        pack(job, lambda tally: None)


def test_a_pack_that_lost_a_shard_is_not_called_done(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 3)
    assert cli("pack", "in", "out").returncode == 0
    (tmp_path / "out/shards/shard-000000.tar").unlink()
    run = cli("pack", "in", "out")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "shard-000000.tar" in run.stderr


def test_shards_without_an_index_are_not_touched(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 3)
    (tmp_path / "out/shards").mkdir(parents=True)
    (tmp_path / "out/shards/mine.tar").write_bytes(b"mine")
    before = tree(tmp_path / "out")
    run = cli("pack", "in", "out")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "without an index" in run.stderr
    assert tree(tmp_path / "out") == before


def test_other_files_in_the_destination_stay(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 3)
    (tmp_path / "out/shards").mkdir(parents=True)
    (tmp_path / "out/notes.md").write_text("mine")
    assert cli("pack", "in", "out").returncode == 0
    assert sorted(tree(tmp_path / "out")) == [
        "index.parquet",
        "notes.md",
        "shards",
        "shards/shard-000000.tar",
    ]


@given(st.integers(1000, 10**14))
def test_plain_bytes_are_a_size(size: int) -> None:
    assert parse_size(str(size)) == parse_size(f"{size}B") == parse_size(f" {size} b ") == size


@given(st.integers(1, 5000), st.sampled_from("KMGT"))
def test_units_are_decimal_or_binary(count: int, letter: str) -> None:
    power = "KMGT".index(letter) + 1
    assert (
        parse_size(f"{count}{letter}B")
        == parse_size(f"{count} {letter.lower()}")
        == (count * 1000**power)
    )
    assert parse_size(f"{count}{letter}iB") == count * 1024**power


def test_sizes_may_have_decimals() -> None:
    assert parse_size("1.5GiB") == 1_610_612_736
    assert parse_size("0.1MB") == 100_000


@pytest.mark.parametrize(
    "text",
    ["", "big", "GB", "-2GB", "2GB!", "1e9", "nan", "999", "0.9KB", "0GB", "1.GB", "2 G B", "٣GB"],
)
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"--shard-size: .*500MB, 2GB or 1\.5GiB"):
        parse_size(text)


def test_a_nonsense_size_ends_the_command_before_anything_is_written(
    cli: Cli, tmp_path: Path
) -> None:
    album(tmp_path / "in", 1)
    run = cli("pack", "in", "out", "--shard-size", "huge")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()


def test_a_terminal_shows_rates_and_the_rejected(tmp_path: Path) -> None:
    album(tmp_path / "in", 3)
    write_pair(tmp_path / "in", "bad.jpg", b"", "empty")
    mine, theirs = pty.openpty()
    program = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "pack", "in", "out", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=clean_environment(tmp_path) | {"TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(mine, 65536):
            shown += chunk
    except OSError:  # the terminal's other end is closed
        pass
    output, _ = process.communicate()
    os.close(mine)
    assert json.loads(output)["samples"] == 3
    for words in (b"4/4", b"images/s", b"MB/s", b"rejected 1"):
        assert words in shown


def test_nothing_but_lines_without_a_terminal(cli: Cli, tmp_path: Path) -> None:
    album(tmp_path / "in", 3)
    run = cli("pack", "in", "out")
    assert run.stdout == ""
    assert run.stderr.startswith("packed 3 samples into 1 shard (")
    assert run.stderr.endswith("in out/shards\n")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "advised"), [([9e6] * 2, True), ([2e8, 9e6], False), ([9e6], False)]
)
def test_small_shards_are_remarked_on(tmp_path: Path, sizes: list[float], advised: bool) -> None:
    shards = [
        Shard(f"{n}.tar", int(size), "00" * 32, ("0",), (0, 1)) for n, size in enumerate(sizes)
    ]
    write_index(tmp_path / "index.parquet", shards)
    packed = PackResult(
        ShardIndex(tmp_path / "index.parquet"), LocalFolder(Path("out")), up_to_date=False
    )
    assert ("FastFile" in "\n".join(pack_summary(packed))) is advised


def test_help_reads_no_image_library() -> None:
    program = (
        "import sys\n"
        "from sm_train.toolkit.cli import main\n"
        "try: main(['pack', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'PIL', 'rich', 'boto3', 'pydantic', 'pyarrow', 'multiprocessing'}\n"
        "print(heavy & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "--shard-size" in run.stdout
    assert run.stdout.endswith("set()\n")
