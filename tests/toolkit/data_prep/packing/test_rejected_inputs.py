"""Inputs that ``sm-train pack`` rejects, and invalid sources and tables."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
from sm_train.entrypoints.data_prep.packing.shard_builder import MAX_BYTES
from sm_train.entrypoints.shards.shard_index import ShardIndex

from tests.conftest import Cli
from tests.support.image_files import image_bytes, write_album, write_pair


def _truncated(kind: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        complete = image_bytes(size=(400, 300), kind=kind)
        write_pair(folder, f"bad.{kind.lower()}", complete[: len(complete) // 2], "truncated")

    return write


def _png_without_end(folder: Path) -> None:
    write_pair(folder, "bad.png", image_bytes(kind="PNG")[:-6], "its last bytes are missing")


def _zero_bytes(folder: Path) -> None:
    write_pair(folder, "bad.jpg", b"", "nothing")


def _text(folder: Path) -> None:
    write_pair(folder, "bad.jpg", b"<html>404 not found</html>", "a web page")


def _other_format(folder: Path) -> None:
    write_pair(folder, "bad.jpg", image_bytes(kind="TIFF"), "a TIFF")


def _bomb(folder: Path) -> None:
    """A PNG of a few hundred bytes that claims 40,000 × 40,000 pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 99))
    write_pair(folder, "bad.png", image + chunk(b"IEND", b""), "a bomb")


def _huge_file(folder: Path) -> None:
    with write_pair(folder, "bad.jpg", image_bytes(), "sparse").open("r+b") as file:
        file.truncate(MAX_BYTES + 1)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "bad.jpg")
    (folder / "bad.txt").write_text("nothing writes to this pipe")


def _dangling_link(folder: Path) -> None:
    (folder / "bad.jpg").symlink_to(folder / "gone.jpg")
    (folder / "bad.txt").write_text("gone")


def _no_caption(folder: Path) -> None:
    write_pair(folder, "bad.jpg", image_bytes(), None)


def _empty_caption(folder: Path) -> None:
    write_pair(folder, "bad.jpg", image_bytes(), " \n\t")


def _latin_1(folder: Path) -> None:
    write_pair(folder, "bad.jpg", image_bytes(), "grün".encode("latin-1"))


def _folder_as_caption(folder: Path) -> None:
    write_pair(folder, "bad.jpg", image_bytes(), None)
    (folder / "bad.txt").mkdir()


def _pipe_as_caption(folder: Path) -> None:
    write_pair(folder, "bad.jpg", image_bytes(), None)
    os.mkfifo(folder / "bad.txt")


BAD_INPUTS = [
    (_truncated("JPEG"), "image-corrupt"),
    (_truncated("PNG"), "image-corrupt"),
    (_truncated("WEBP"), "image-corrupt"),
    (_png_without_end, "image-corrupt"),
    (_zero_bytes, "image-empty"),
    (_text, "image-kind"),
    (_other_format, "image-kind"),
    (_bomb, "image-bomb"),
    (_huge_file, "image-too-large"),
    (_pipe, "image-unreadable"),
    (_dangling_link, "image-missing"),
    (_no_caption, "caption-missing"),
    (_empty_caption, "caption-empty"),
    (_latin_1, "caption-not-utf8"),
    (_folder_as_caption, "caption-unreadable"),
    (_pipe_as_caption, "caption-unreadable"),
]


@pytest.mark.parametrize(("write_input", "reason"), BAD_INPUTS)
def test_a_bad_input_is_rejected_with_its_reason(
    cli: Cli, tmp_path: Path, write_input: Callable[[Path], None], reason: str
) -> None:
    write_album(tmp_path / "in", 2)
    write_input(tmp_path / "in")
    run = cli("pack", "in", "out", "--json")
    assert run.returncode == 0
    assert json.loads(run.stdout)["rejected"] == {reason: 1}
    assert json.loads(run.stdout)["samples"] == 2
    [rejection] = ShardIndex(tmp_path / "out/index.parquet").rejected()
    assert (rejection.source[:4], rejection.reason) == ("bad.", reason)
    assert rejection.detail
    assert " at 0x" not in rejection.detail  # memory addresses differ between runs
    assert f"rejected 1: 1 {reason} (bad." in run.stderr
    assert "Warning" not in run.stderr


def test_a_jpeg_truncated_anywhere_is_rejected(cli: Cli, tmp_path: Path) -> None:
    """Corruption must be detected here and not by a decoder in the training job."""
    write_album(tmp_path / "in", 1)
    complete = image_bytes(size=(64, 64))
    for length in range(1, len(complete), 7):
        write_pair(tmp_path / "in", f"cut-{length:05}.jpg", complete[:length], "truncated")
    run = cli("pack", "in", "out", "--json")
    count = len(range(1, len(complete), 7))
    assert json.loads(run.stdout)["rejected"] == {"image-corrupt": count}


@pytest.mark.parametrize("write_input", [_text, _other_format])
def test_other_formats_are_rejected_with_the_supported_ones(
    cli: Cli, tmp_path: Path, write_input: Callable[[Path], None]
) -> None:
    write_album(tmp_path / "in", 1)
    write_input(tmp_path / "in")
    assert cli("pack", "in", "out").returncode == 0
    [rejection] = ShardIndex(tmp_path / "out/index.parquet").rejected()
    assert rejection.detail in ("HTML; not JPEG, PNG or WebP", "TIFF; not JPEG, PNG or WebP")


def test_the_summary_names_only_a_few_rejected_inputs(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 1)
    for number in range(1000):
        write_pair(tmp_path / "in", f"empty-{number:04}.jpg", b"", "x")
    write_pair(tmp_path / "in", "broken.jpg", b"x", "x")
    run = cli("pack", "in", "out")
    summary = (
        "rejected 1,001: 1 image-corrupt (broken.jpg), 1,000 image-empty (empty-0000.jpg, "
        "empty-0001.jpg, …); -v lists all, as does out/index.parquet\n"
    )
    assert summary in run.stderr
    assert run.stderr.count("\n") == 2
    listed = cli("pack", "in", "out", "-v", "--quiet").stderr  # --quiet hides no result
    assert summary in listed
    assert "\nrejected: empty-0999.jpg: image-empty: " in listed
    assert listed.count("\n") == 2 + 1001
    assert ShardIndex(tmp_path / "out/index.parquet").header.rejected == 1001


def test_a_pack_without_accepted_inputs_is_an_error_and_writes_nothing(
    cli: Cli, tmp_path: Path
) -> None:
    write_pair(tmp_path / "in", "a.jpg", b"", "x")
    write_pair(tmp_path / "in", "b.jpg", b"", "x")
    write_pair(tmp_path / "in", "c.jpg", image_bytes(), None)
    run = cli("pack", "in", "deep/out", "--json")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "sm-train: in: nothing to pack, all 3 inputs were rejected: "
        "image-empty 2, caption-missing 1\n"
    )
    assert not (tmp_path / "deep").exists()


def test_unusual_file_names_are_supported(cli: Cli, tmp_path: Path) -> None:
    names = [b"[bold]x.jpg", b"dots.in.name.jpg", b"gr\xfcn.jpg", "猫 🐈.jpg".encode()]
    for name in names:
        path = Path(os.fsdecode(tmp_path / "in")) / os.fsdecode(name)
        write_pair(path.parent, path.name, image_bytes(), "odd name")
        write_pair(path.parent, "no-caption-" + path.name, image_bytes(), None)
    run = cli("pack", "in", "out", "--json", env={"LC_ALL": "C.UTF-8"})
    assert run.returncode == 0
    assert json.loads(run.stdout)["samples"] == 4
    assert "no-caption-[bold]x.jpg" in run.stderr
    reader = webdataset.WebDataset(
        str(tmp_path / "out/shards/shard-000000.tar"), shardshuffle=False
    )
    sources = {os.fsencode(json.loads(sample["json"])["source"]) for sample in reader}
    assert sources == set(names)


def test_a_missing_source_is_one_line(cli: Cli, tmp_path: Path) -> None:
    run = cli("pack", "nowhere", "out")
    assert (run.returncode, run.stderr) == (2, "sm-train: nowhere: no such folder or table\n")
    assert not (tmp_path / "out").exists()


def test_a_folder_without_images_is_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/notes.txt").write_text("no image")
    run = cli("pack", "in", "out")
    assert (run.returncode, run.stderr) == (
        2,
        "sm-train: in: no images in it (jpg, jpeg, png, webp); skipped 1: txt: notes.txt\n",
    )
    assert not (tmp_path / "out").exists()


def write_table(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write ``rows`` as a table of the format that the extension names."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import csv

        file = io.StringIO()
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        path.write_text(file.getvalue())
    return path


KINDS = pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])


@pytest.mark.slow
@KINDS
def test_captions_come_from_a_table(cli: Cli, tmp_path: Path, kind: str) -> None:
    for name in ("a.jpg", "deep/b.jpg", "unlisted.jpg"):
        write_pair(tmp_path / "in", name, image_bytes(), None)
    write_table(
        tmp_path / f"captions.{kind}",
        [
            {"image": "deep/b.jpg", "caption": 'a "quoted", two-line\ncaption'},
            {"image": "./a.jpg", "caption": "first"},
            {"image": "deep/../a.jpg", "caption": "grün"},
        ],
    )
    run = cli("pack", "in", "out", "--captions", f"captions.{kind}")
    assert run.returncode == 0
    read = list(
        webdataset.WebDataset(str(tmp_path / "out/shards/shard-000000.tar"), shardshuffle=False)
    )
    assert [(json.loads(sample["json"])["source"], sample["txt"].decode()) for sample in read] == [
        ("a.jpg", "first"),
        ("a.jpg", "grün"),
        ("deep/b.jpg", 'a "quoted", two-line\ncaption'),
    ]


@pytest.mark.slow
@KINDS
def test_the_source_may_be_a_table(cli: Cli, tmp_path: Path, kind: str) -> None:
    write_pair(tmp_path / "in", "deep/b.jpg", image_bytes(), None)
    inside, outside = tmp_path / "in/deep/b.jpg", tmp_path / "secret.jpg"
    write_pair(tmp_path, "secret.jpg", image_bytes(), None)
    write_table(
        tmp_path / f"in/list.{kind}",
        [
            {"file": "deep/b.jpg", "text": "fine"},
            {"file": str(inside), "text": "absolute path inside the folder"},
            {"file": "gone.jpg", "text": "missing"},
            {"file": "gone.jpg/below.jpg", "text": "missing"},
            {"file": "zero\0byte.jpg", "text": "missing"},
            {"file": "x" * 5000 + ".jpg", "text": "longer than a name can be"},
            {"file": "deep", "text": "a folder"},
            {"file": "", "text": "no image"},
            {"file": "../secret.jpg", "text": "outside the folder"},
            {"file": str(outside), "text": "outside the folder"},
            {"file": "deep/b.jpg", "text": "  "},
        ],
    )
    options = ("--image-column", "file", "--caption-column", "text", "--json")
    run = cli("pack", f"in/list.{kind}", "out", *options)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["samples"] == 2
    assert json.loads(run.stdout)["rejected"] == {
        "image-missing": 4,
        "outside-source": 2,
        "caption-empty": 1,
        "image-unreadable": 2,
    }
    listed = [item.source for item in ShardIndex(tmp_path / "out/index.parquet").rejected()]
    assert listed == sorted(listed)


def test_rows_without_a_valid_caption_are_rejected(cli: Cli, tmp_path: Path) -> None:
    write_pair(tmp_path / "in", "a.jpg", image_bytes(), None)
    rows = [
        '{"image": "a.jpg", "caption": "fine"}',
        '{"image": "a.jpg", "caption": null}',
        '{"image": "a.jpg"}',
        "",
        '{"image": "a.jpg", "caption": ["a", ["nested"]]}',
        '{"image": "a.jpg", "caption": "half a \\ud83d pair"}',
        '{"image": 7, "caption": "x"}',
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(rows))
    run = cli("pack", "in", "out", "--captions", "list.jsonl", "--json")
    assert json.loads(run.stdout)["samples"] == 1
    assert json.loads(run.stdout)["rejected"] == {
        "caption-missing": 2,
        "caption-not-text": 1,
        "caption-not-utf8": 1,
        "image-missing": 1,
    }


def test_a_latin_1_row_does_not_affect_other_rows(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 2)
    (tmp_path / "list.csv").write_bytes(
        "image,caption\n000.jpg,grün\n".encode("latin-1") + "001.jpg,grün\n".encode()
    )
    run = cli("pack", "in", "out", "--captions", "list.csv", "--json")
    assert json.loads(run.stdout)["samples"] == 1
    assert json.loads(run.stdout)["rejected"] == {"caption-not-utf8": 1}


@KINDS
def test_a_missing_column_lists_the_existing_ones(cli: Cli, tmp_path: Path, kind: str) -> None:
    write_album(tmp_path / "in", 1)
    write_table(tmp_path / f"list.{kind}", [{"image": "000.jpg", "text": "x", "id": "7"}])
    run = cli("pack", "in", "out", "--captions", f"list.{kind}")
    assert run.returncode == 2
    assert run.stderr == (
        f"sm-train: list.{kind}: no column 'caption'; it has image, text, id "
        "(--image-column, --caption-column)\n"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("list.csv", b"", "list.csv: no column 'image' and no column 'caption'; it has none"),
        ("list.csv", b"image,caption\n", "list.csv: the table has no rows"),
        (
            "list.csv",
            b'image,caption\na.jpg,"' + b"x" * 200_000,
            "list.csv:2: not CSV: unexpected end of data",
        ),
        ("list.csv", b'image,caption\na.jpg,"open\nb.jpg,x\n', "list.csv:3: not CSV"),
        ("list.jsonl", b"", "list.jsonl: the table has no rows"),
        ("list.jsonl", b'{"image": "a", "caption": "b"}\n{"ima', "list.jsonl:2: not JSON"),
        ("list.jsonl", b"[1]\n", "list.jsonl:1: each line must be a JSON object"),
        ("list.parquet", b"PAR1 but cut short", "list.parquet: not parquet"),
        ("list.parquet", b"", "list.parquet: not parquet"),
        ("list.xlsx", b"x", "list.xlsx: neither a folder of images nor a table (.csv, .jsonl"),
    ],
)
def test_an_invalid_table_is_one_line(
    cli: Cli, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    run = cli("pack", name, "out")
    assert run.returncode == 2
    assert run.stderr.startswith(f"sm-train: {message}")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_caption_table_is_one_line(cli: Cli, tmp_path: Path) -> None:
    write_album(tmp_path / "in", 1)
    run = cli("pack", "in", "out", "--captions", "gone.csv")
    assert (run.returncode, run.stderr) == (2, "sm-train: gone.csv: no such table\n")
