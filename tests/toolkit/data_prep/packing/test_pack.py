"""``sm-train pack``: its shards and index, repeated runs, and its output."""

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
from sm_train.entrypoints.data_prep.work.worker_pool import WorkProgress
from sm_train.entrypoints.shards.shard_format import Shard
from sm_train.entrypoints.shards.shard_index import ShardIndex, write_index
from sm_train.entrypoints.shards.shard_verification import verify_shard
from sm_train.entrypoints.storage.storage import LocalFolder
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.packing.pack import PackJob, PackResult, pack, parse_size
from sm_train.toolkit.data_prep.packing.pack_report import pack_summary

from tests.conftest import Cli, clean_environment
from tests.support.image_files import image_bytes, read_tree, write_album, write_pair


def samples(destination: Path) -> list[dict[str, bytes]]:
    """Read all samples in the order of the shards."""
    urls = [str(path) for path in sorted((destination / "shards").iterdir())]
    return list(webdataset.WebDataset(urls, shardshuffle=False))


def test_packing_a_folder_writes_shards_and_an_index(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 7)
    run = cli("pack", "in", "out", "--shard-size", "6KB", "--json")
    assert run.returncode == 0
    result = json.loads(run.stdout)
    index = ShardIndex(tmp_path / "out" / "index.parquet")
    assert result == {
        "shards": len(index),
        "samples": 7,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "out/shards").iterdir()),
        "rejected": {},
        "skipped": {},
        "filtered": 0,
        "appended": None,
        "colors": {
            "profiles": {"none": 7},
            "depths": {"8": 7},
            "cmyk": 0,
            "hdr": 0,
            "unconverted": {},
        },
        "index": "out/index.parquet",
        "shards_path": "out/shards",
    }
    assert len(index) > 1
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["index.parquet", "inputs", "shards"]
    assert [path.name for path in sorted((tmp_path / "out/shards").iterdir())] == [*index.names]
    for number, name in enumerate(index.names):
        verify_shard(tmp_path / "out/shards" / name, index.shard(number))


def test_images_keep_their_bytes_and_are_ordered_by_path(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 5)
    assert cli("pack", "in", "out").returncode == 0
    read = samples(tmp_path / "out")
    sources = ["000.jpg", "001.jpg", "003.jpg", "004.jpg", "more/002.jpg"]
    assert [json.loads(sample["json"])["source"] for sample in read] == sources
    assert [sample["jpg"] for sample in read] == [
        (tmp_path / "in" / source).read_bytes() for source in sources
    ]
    assert [sample["txt"].decode() for sample in read] == [f"picture {n}" for n in (0, 1, 3, 4, 2)]
    assert [sample["__key__"] for sample in read] == [f"{n:09d}" for n in range(5)]


def test_the_format_is_detected_from_the_content(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_pair(folder, "a.JPEG", image_bytes(size=(60, 40)), "a")
    write_pair(folder, "b.png", image_bytes(size=(10, 20), kind="PNG"), "b")
    write_pair(folder, "c.webp", image_bytes(size=(30, 30), kind="WEBP"), "c")
    write_pair(
        folder, "d.jpg", image_bytes(size=(5, 6), kind="PNG"), "a PNG with another extension"
    )
    write_pair(folder, "e.jpg", image_bytes(size=(8, 8), kind="MPO"), "a JPEG of a phone")
    assert cli("pack", "in", "out").returncode == 0
    read = samples(tmp_path / "out")
    metadata = [json.loads(sample["json"]) for sample in read]
    assert [(item["width"], item["height"], item["format"]) for item in metadata] == [
        (60, 40, "jpeg"),
        (10, 20, "png"),
        (30, 30, "webp"),
        (5, 6, "png"),
        (8, 8, "jpeg"),
    ]
    extensions = [next(iter({"jpg", "png", "webp"} & sample.keys())) for sample in read]
    assert extensions == ["jpg", "png", "webp", "png", "jpg"]


def test_captions_are_stripped_of_white_space_and_byte_order_mark(cli: Cli, tmp_path: Path) -> None:
    write_pair(
        tmp_path / "in", "a.jpg", image_bytes(), b"\xef\xbb\xbf  two\nlines, gr\xc3\xbcn \r\n"
    )
    assert cli("pack", "in", "out").returncode == 0
    [sample] = samples(tmp_path / "out")
    assert sample["txt"].decode() == "two\nlines, grün"


def test_links_inside_the_folder_are_followed_once(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in" / "album", 2)
    write_pair(tmp_path / "in", "a.jpg", image_bytes(9), "a")
    (tmp_path / "in" / "b.jpg").symlink_to("a.jpg")
    (tmp_path / "in" / "b.txt").symlink_to("a.txt")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    (tmp_path / "link").symlink_to("in")
    assert cli("pack", "link", "out").returncode == 0
    sources = [json.loads(sample["json"])["source"] for sample in samples(tmp_path / "out")]
    assert sources == ["a.jpg", "album/000.jpg", "album/001.jpg", "b.jpg"]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["in", "in/**/*", "in/list.csv"])
def test_links_out_of_the_folder_are_refused(cli: Cli, tmp_path: Path, source: str) -> None:
    """The content of a private file would otherwise be in the shards, as image or as caption."""
    write_album(tmp_path / "private", 2)
    for name in ("good.jpg", "caption.jpg"):
        write_pair(tmp_path / "in", name, image_bytes(9), "a")
    (tmp_path / "in" / "caption.txt").unlink()
    (tmp_path / "in" / "caption.txt").symlink_to("/etc/passwd")
    (tmp_path / "in" / "image.jpg").symlink_to("../private/000.jpg")
    (tmp_path / "in" / "image.txt").write_text("words")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "private")
    rows = ["good.jpg,a", "image.jpg,b", "folder/000.jpg,c"]
    (tmp_path / "in" / "list.csv").write_text("\n".join(["image,caption", *rows]) + "\n")
    packed = cli("pack", source, "out")
    assert packed.returncode == 0, packed.stderr
    read = samples(tmp_path / "out")
    assert [json.loads(sample["json"])["source"] for sample in read] == ["good.jpg"]
    rejected = list(ShardIndex(tmp_path / "out/index.parquet").rejected())
    assert {row.reason for row in rejected} == {"outside-source"}
    details = {row.source: row.detail for row in rejected}
    assert details["image.jpg"].startswith("a link leads to ../private/000.jpg, outside the folder")
    if source == "in":
        # The linked folder is not listed: it may be a whole disk.
        assert details.keys() == {"image.jpg", "caption.jpg", "folder"}
    if not source.endswith(".csv"):
        assert "its caption leads to" in details["caption.jpg"]
        assert "etc/passwd, outside" in details["caption.jpg"]


def test_equal_inputs_give_equal_bytes(cli: Cli, tmp_path: Path) -> None:
    """Whatever the number of workers, the location and the modification times."""
    write_album(tmp_path / "in", 24)
    write_pair(tmp_path / "in", "005.jpg", image_bytes(5)[:400], "cut")
    write_pair(tmp_path / "in", "013.jpg", b"", "empty")
    write_pair(tmp_path / "in", "015.png", b"no image", "nonsense")
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.jpg"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    for source, destination, workers in [("in", "one", 1), ("in", "three", 3), ("copy", "far", 2)]:
        run = cli("pack", source, destination, "--shard-size", "9KB", "--workers", str(workers))
        assert run.returncode == 0
    packed = read_tree(tmp_path / "one")
    assert len(packed) > 4
    assert read_tree(tmp_path / "three") == packed
    assert read_tree(tmp_path / "far") == packed


def test_packing_again_changes_nothing(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3)
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
    write_pair(folder, "new.jpg", image_bytes(99), "new")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [_other_size, _new_image, _lost_caption, _edited_caption_of_equal_length]
)
def test_a_pack_of_other_inputs_or_options_is_not_overwritten(
    cli: Cli, tmp_path: Path, change: object
) -> None:
    write_album(tmp_path / "in", 3)
    assert cli("pack", "in", "out").returncode == 0
    before = read_tree(tmp_path / "out")
    assert callable(change)
    run = cli("pack", "in", "out", *change(tmp_path / "in"))
    assert run.returncode == 2
    assert run.stderr.startswith("sm-train: out: ")
    assert run.stderr.count("\n") == 1
    assert read_tree(tmp_path / "out") == before


def test_an_image_that_changes_during_a_pack_is_noticed_by_the_next_one(tmp_path: Path) -> None:
    """Although the index is written after the change."""
    write_album(tmp_path / "in", 4)
    job = PackJob(str(tmp_path / "in"), str(tmp_path / "out"), None, 10**6, workers=1)

    def touch_first_image(progress: WorkProgress) -> None:
        os.utime(tmp_path / "in/000.jpg", ns=(0, time.time_ns()))

    pack(job, touch_first_image)
    with pytest.raises(UserError, match="has changed since"):
        pack(job, lambda progress: None)


def test_a_pack_with_a_missing_shard_is_an_error(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3)
    assert cli("pack", "in", "out").returncode == 0
    (tmp_path / "out/shards/shard-000000.tar").unlink()
    run = cli("pack", "in", "out")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "shard-000000.tar" in run.stderr


def test_shards_without_an_index_are_not_changed(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3)
    (tmp_path / "out/shards").mkdir(parents=True)
    (tmp_path / "out/shards/mine.tar").write_bytes(b"mine")
    before = read_tree(tmp_path / "out")
    run = cli("pack", "in", "out")
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "without an index" in run.stderr
    assert read_tree(tmp_path / "out") == before


def test_other_files_in_the_destination_are_kept(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3)
    (tmp_path / "out/shards").mkdir(parents=True)
    (tmp_path / "out/notes.md").write_text("mine")
    assert cli("pack", "in", "out").returncode == 0
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["index.parquet", "inputs", "notes.md", "shards"]
    assert (tmp_path / "out/notes.md").read_text() == "mine"


@given(st.integers(1000, 10**14))
def test_a_size_may_be_plain_bytes(size: int) -> None:
    assert parse_size(str(size)) == parse_size(f"{size}B") == parse_size(f" {size} b ") == size


@given(st.integers(1, 5000), st.sampled_from("KMGT"))
def test_size_units_are_decimal_or_binary(count: int, letter: str) -> None:
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
def test_an_invalid_size_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match=r"--shard-size: .*500MB, 2GB or 1\.5GiB"):
        parse_size(text)


def test_an_invalid_size_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 1)
    run = cli("pack", "in", "out", "--shard-size", "huge")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert not (tmp_path / "out").exists()


def test_a_terminal_shows_rates_and_rejected_inputs(tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3)
    write_pair(tmp_path / "in", "bad.jpg", b"", "empty")
    terminal, stderr = pty.openpty()
    program = "import sys; from sm_train.toolkit.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "pack", "in", "out", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=clean_environment(tmp_path) | {"TERM": "xterm"},
    )
    os.close(stderr)
    shown = b""
    try:
        while chunk := os.read(terminal, 65536):
            shown += chunk
    except OSError:  # the terminal's other end is closed
        pass
    output, _ = process.communicate()
    os.close(terminal)
    assert json.loads(output)["samples"] == 3
    for text in (b"4/4", b"images/s", b"MB/s", b"rejected 1"):
        assert text in shown


def test_without_a_terminal_only_the_summary_is_printed(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 3)
    run = cli("pack", "in", "out")
    assert run.stdout == ""
    assert run.stderr.startswith("packed 3 samples into 1 shard (")
    assert run.stderr.endswith("in out/shards\n")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("sizes", "warned"), [([9e6] * 2, True), ([2e8, 9e6], False), ([9e6], False)]
)
def test_small_shards_are_warned_about(tmp_path: Path, sizes: list[float], warned: bool) -> None:
    shards = [
        Shard(f"{n}.tar", int(size), "00" * 32, ("0",), (0, 1)) for n, size in enumerate(sizes)
    ]
    write_index(tmp_path / "index.parquet", shards)
    result = PackResult(ShardIndex(tmp_path / "index.parquet"), LocalFolder(Path("out")), False, {})
    assert ("FastFile" in "\n".join(pack_summary(result))) is warned


def test_help_imports_no_heavy_library() -> None:
    program = (
        "import sys\n"
        "from sm_train.toolkit.cli import main\n"
        "try: main(['pack', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'PIL', 'rich', 'boto3', 'pydantic', 'pyarrow', 'duckdb', 'multiprocessing'}\n"
        "print(heavy & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "--shard-size" in run.stdout
    assert run.stdout.endswith("set()\n")
