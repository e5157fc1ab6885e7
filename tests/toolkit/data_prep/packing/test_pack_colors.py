"""Colors of a data set from packing to its report: counts, and the policy that is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sm_train.entrypoints.shards.shard_index import ShardIndex

from tests.conftest import Cli
from tests.support.image_files import write_pair
from tests.support.images.color_pictures import CHART, cmyk_profile, encode, png_with
from tests.support.images.icc_profiles import rgb_profile, with_tag

COUNTS = {
    "profiles": {"Adobe RGB": 3, "none": 2, "CMYK": 1},
    "depths": {"8": 6},
    "cmyk": 1,
    "hdr": 0,
    "unconverted": {"gAMA": 1},
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    adobe = rgb_profile("Adobe RGB")
    for number in range(3):
        image = CHART.rotate(90 * number)
        write_pair(
            tmp_path / "in", f"a{number}.jpg", encode(image, "JPEG", icc_profile=adobe), "a chart"
        )
    cmyk = encode(CHART.convert("CMYK"), "JPEG", icc_profile=cmyk_profile())
    write_pair(tmp_path / "in", "cmyk.jpg", cmyk, "a chart")
    write_pair(
        tmp_path / "in", "gamma.png", png_with((b"gAMA", (100_000).to_bytes(4, "big"))), "a chart"
    )
    write_pair(tmp_path / "in", "hdr.png", png_with((b"cICP", b"\x09\x10\x00\x01")), "a chart")
    write_pair(tmp_path / "in", "plain.png", encode(CHART, "PNG"), "a chart")
    return tmp_path / "in"


def test_colors_are_counted_by_pack_index_and_data_report(
    cli: Cli, photos: Path, tmp_path: Path
) -> None:
    done = cli("pack", "in", "out", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["colors"] == COUNTS
    assert document["rejected"] == {"image-hdr": 1}
    assert "colors: Adobe RGB 3, none 2, CMYK 1, CMYK channels 1, color-unconverted (gAMA) 1" in (
        done.stderr
    )
    assert "warning: color-unconverted: 1 images (17%)" in done.stderr
    recorded = ShardIndex(tmp_path / "out/index.parquet").header.options
    assert (recorded["icc_profile"], recorded["hdr"]) == ("srgb", "reject")
    [facts] = json.loads(cli("data-report", "out", "--json").stdout)["sets"]
    assert facts["colors"] == COUNTS
    # What an index does not know from packing, it reads from the images.
    (tmp_path / "out/shards").rename(tmp_path / "shards")
    done = cli("index", "shards", "--json")
    assert json.loads(done.stdout)["colors"] == COUNTS


def test_removal_keeps_count_of_colors(cli: Cli, photos: Path, tmp_path: Path) -> None:
    assert cli("pack", "in", "out").returncode == 0
    done = cli("remove", "out", "a0.jpg", "--yes")
    assert done.returncode == 0, done.stderr
    assert ShardIndex(tmp_path / "out/index.parquet").header.colors["Adobe RGB/RGB/8"] == 2


def test_hdr_is_packed_on_request_and_an_append_names_all_options_that_differ(
    cli: Cli, photos: Path
) -> None:
    done = cli("pack", "in", "out", "--hdr", "keep", "--icc-profile", "ignore", "--json")
    assert json.loads(done.stdout)["colors"]["hdr"] == 1
    assert "icc_profile: ignore takes 4 images of other color spaces than sRGB as stored" in (
        done.stderr
    )
    done = cli("pack", "in", "out", "--append", "--min-side", "9")
    assert done.returncode == 2
    assert done.stderr == (
        "sm-train: --append: out was packed with --hdr keep, with --icc-profile ignore, without "
        "--min-side; use the same options\n"
    )


def test_hdr_that_is_encoded_again_stays_counted(cli: Cli, photos: Path) -> None:
    done = cli("pack", "in", "out", "--hdr", "keep", "--quality", "95", "--json")
    assert json.loads(done.stdout)["colors"]["hdr"] == 1


def test_an_index_reads_profiles_of_more_than_64_kb(cli: Cli, tmp_path: Path) -> None:
    profile = with_tag(rgb_profile("Adobe RGB"), "priv", bytes(200_000))
    for image_format, suffix in (("JPEG", "jpg"), ("WEBP", "webp")):
        content = encode(CHART, image_format, icc_profile=profile)
        write_pair(tmp_path / "in", f"{image_format}.{suffix}", content, "a chart")
    counts = json.loads(cli("pack", "in", "out", "--json").stdout)["colors"]
    assert counts["profiles"] == {"Adobe RGB": 2}
    (tmp_path / "out/shards").rename(tmp_path / "shards")
    assert json.loads(cli("index", "shards", "--json").stdout)["colors"] == counts
