"""Files that ``pack`` skips are counted by kind; ``--convert`` packs images among them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pillow_heif
import pytest
import webdataset
from PIL import Image

from tests.conftest import Cli
from tests.support.image_files import image_bytes, write_album, write_pair
from tests.support.moto_server import Aws

pillow_heif.register_heif_opener()

OTHER_FORMATS = {
    "a.heic": "HEIF",
    "b.HEIC": "HEIF",
    "more/c.avif": "AVIF",
    "d.tif": "TIFF",
    "e.tiff": "TIFF",
    "f.gif": "GIF",
    "g.bmp": "BMP",
    "h.jp2": "JPEG2000",
}


def write_mixed_album(folder: Path) -> None:
    write_album(folder, 3)
    for number, (name, image_format) in enumerate(OTHER_FORMATS.items()):
        write_pair(folder, name, image_bytes(number, kind=image_format), f"converted {name}")
    for name in ("notes.md", "drawing.svg", "orphan.txt", "Makefile", "a.heic.json"):
        (folder / name).write_text("no image")


def test_skipped_files_are_counted_and_named_by_kind(cli: Cli, tmp_path: Path) -> None:
    write_mixed_album(tmp_path / "in")
    for _ in range(2):  # also when the pack is up to date
        run = cli("pack", "in", "out", "--json")
        assert run.returncode == 0, run.stderr
        document = json.loads(run.stdout)
        assert document["rejected"] == {}
        assert {kind: files["count"] for kind, files in document["skipped"].items()} == {
            "heic": 2,
            "tiff": 2,
            "avif": 1,
            "bmp": 1,
            "gif": 1,
            "jp2": 1,
            "json": 1,
            "md": 1,
            "no extension": 1,
            "svg": 1,
            "txt": 1,
        }
        assert document["skipped"]["avif"]["first"] == ["more/c.avif"]
        assert "skipped 2: heic: a.heic, b.HEIC; --convert packs them" in run.stderr
        assert "skipped 1: svg: drawing.svg\n" in run.stderr


def test_convert_packs_other_formats_with_their_captions(cli: Cli, tmp_path: Path) -> None:
    write_mixed_album(tmp_path / "in")
    run = cli("pack", "in", "out", "--convert", "--json")
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert (document["samples"], document["rejected"]) == (3 + len(OTHER_FORMATS), {})
    assert set(document["skipped"]) == {"json", "md", "no extension", "svg", "txt"}
    shards = [str(path) for path in sorted((tmp_path / "out/shards").glob("*.tar"))]
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    for name in OTHER_FORMATS:
        [sample] = [item for item in samples if json.loads(item["json"])["source"] == name]
        assert sample["txt"].decode() == f"converted {name}"
        with Image.open(io.BytesIO(sample["jpg"])) as image:
            assert (image.format, image.size) == ("JPEG", (48, 32))


def test_a_folder_of_other_formats_says_what_is_in_it(cli: Cli, tmp_path: Path) -> None:
    write_pair(tmp_path / "in", "a.heic", image_bytes(kind="HEIF"), "a phone's picture")
    run = cli("pack", "in", "out")
    assert run.returncode == 2
    assert "skipped 1: heic: a.heic; --convert packs them" in run.stderr
    assert cli("pack", "in", "out", "--convert").returncode == 0


def test_a_misnamed_file_is_converted_by_its_content(cli: Cli, tmp_path: Path) -> None:
    write_pair(tmp_path / "in", "a.jpg", image_bytes(kind="TIFF"), "a TIFF")
    write_pair(tmp_path / "in", "b.jpg", image_bytes(), "a JPEG")
    rejected = json.loads(cli("pack", "in", "one", "--json").stdout)["rejected"]
    assert rejected == {"image-kind": 1}
    assert json.loads(cli("pack", "in", "two", "--convert", "--json").stdout)["samples"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("convert", [False, True])
def test_objects_in_s3_are_selected_like_files(cli: Cli, aws: Aws, convert: bool) -> None:
    client = aws.client("s3")
    client.create_bucket(Bucket="raw")
    contents = {
        "a.jpg": image_bytes(),
        "a.txt": b"a JPEG",
        "b.heic": image_bytes(kind="HEIF"),
        "b.txt": b"a HEIC",
        "c.csv": b"a table",
        "folder/": b"",
    }
    for key, content in contents.items():
        client.put_object(Bucket="raw", Key=f"p/{key}", Body=content)
    run = cli(
        "--region",
        "us-east-1",
        "pack",
        "s3://raw/p/",
        "out",
        "--json",
        *(["--convert"] if convert else []),
        network="loopback",
        env=aws.environment,
    )
    assert run.returncode == 0, run.stderr
    document = json.loads(run.stdout)
    assert document["samples"] == (2 if convert else 1)
    assert list(document["skipped"]) == (["csv"] if convert else ["csv", "heic"])


@pytest.mark.parametrize("where", ["folder", "s3"])
def test_captions_of_kohya_are_packed(cli: Cli, tmp_path: Path, aws: Aws, where: str) -> None:
    """Trainers of sd-scripts write `.caption`; next to a `.txt` file it is not used, but named."""
    texts = {"a.caption": "a dog", "b.txt": "tags", "b.caption": "a cat", "c.txt": "a bird"}
    files = {name: text.encode() for name, text in texts.items()}
    files["stray.caption"] = b"none"
    files |= {f"{name}.jpg": image_bytes(number) for number, name in enumerate("abc")}
    source = "in" if where == "folder" else "s3://raw/photos/"
    if where == "folder":
        (tmp_path / "in").mkdir()
        for name, content in files.items():
            (tmp_path / "in" / name).write_bytes(content)
    else:
        aws.make_bucket("raw", **{f"photos/{name}": content for name, content in files.items()})
    environment = {"network": "loopback", "env": aws.environment} if where == "s3" else {}
    run = cli("--region", "us-east-1", "pack", source, "out", "--json", **environment)
    assert run.returncode == 0, run.stderr
    skipped = json.loads(run.stdout)["skipped"]
    assert skipped == {"caption": {"count": 2, "first": ["b.caption", "stray.caption"]}}
    assert set(packed_captions(tmp_path / "out").values()) == {"a bird", "a dog", "tags"}


def packed_captions(destination: Path) -> dict[str, str]:
    return {
        sample["__key__"]: sample["txt"].decode()
        for shard in sorted((destination / "shards").glob("*.tar"))
        for sample in webdataset.WebDataset(str(shard), shardshuffle=False)
    }


def test_another_caption_file_is_another_input(cli: Cli, tmp_path: Path) -> None:
    """Both have the same size, and the file that is left is older than the pack."""
    write_pair(tmp_path / "in", "a.jpg", image_bytes(0), "text A")
    (tmp_path / "in/a.caption").write_text("text B")
    assert cli("pack", "in", "packed").returncode == 0
    (tmp_path / "in/a.txt").unlink()
    refused = cli("pack", "in", "packed")
    assert refused.returncode == 2
    assert refused.stderr.startswith("sm-train: packed: ")
    appended = cli("pack", "in", "packed", "--append")
    assert appended.returncode == 3
    assert "1 image not packed" in appended.stderr
