"""What an index counts of the colors of its images, and what a policy makes of that."""

from __future__ import annotations

from sm_train.entrypoints.job_interface.job_config import (
    DEFAULT_COLOR,
    UNRECORDED_COLOR,
    ColorPolicy,
)
from sm_train.entrypoints.sample_metadata.color_counts import (
    ColorCounts,
    latents_problem,
    recorded_color,
)

CODES = {
    "none/RGB/8": 600,
    "sRGB/RGB/8": 300,
    "Adobe RGB/RGB/8": 90,
    "CMYK/CMYK/8": 5,
    "Display P3/RGB/16/HDR PQ": 2,
    "none/RGB/8/gAMA": 1,
    "none/gray/8/cICP": 1,
    "none/gray/8": 1,
}


def test_images_are_counted_by_what_they_state() -> None:
    counts = ColorCounts.of(CODES)
    assert counts.images == 1000
    assert counts.profiles["none"] == 603
    assert counts.profiles["Adobe RGB"] == 90
    assert counts.depths == {"8": 998, "16": 2}
    assert (counts.cmyk, counts.hdr) == (5, 2)
    assert counts.unconverted == {"gAMA": 1, "cICP": 1}
    assert not counts.is_usual
    assert ColorCounts.of({"none/RGB/8": 3, "sRGB/gray/8": 1}).is_usual


def test_the_default_policy_distorts_what_no_reader_converts() -> None:
    found = [text for _, text, _ in ColorCounts.of(CODES).distortions(DEFAULT_COLOR)]
    assert found == [
        "2 HDR images (0.20%) are left out as image-hdr",
        "color-unconverted: 2 images (0.20%) state their colors in PNG chunks alone, which are not "
        "converted: gAMA 1, cICP 1",
    ]
    few = CODES | {"none/RGB/8": 1_999_600}
    [(key, _, _)] = ColorCounts.of(few).distortions(DEFAULT_COLOR)
    assert key == "hdr"


def test_pixels_as_stored_are_not_those_that_people_see() -> None:
    [(key, found, fix)] = ColorCounts.of(CODES).distortions(UNRECORDED_COLOR)
    assert (key, fix) == ("icc_profile", "set icc_profile: srgb")
    assert "takes 97 images of other color spaces than sRGB as stored: Adobe RGB 9%" in found
    assert not list(ColorCounts.of({}).distortions(UNRECORDED_COLOR))
    assert not list(ColorCounts.of({"sRGB/RGB/8": 4}).distortions(UNRECORDED_COLOR))


def test_a_record_without_a_policy_means_that_pixels_were_taken_as_stored() -> None:
    assert recorded_color({}) == ColorPolicy("ignore", "keep")
    assert recorded_color(vars(DEFAULT_COLOR) | {"resolution": 512}) == DEFAULT_COLOR
    assert latents_problem(DEFAULT_COLOR, DEFAULT_COLOR, 512) is None
    problem = latents_problem(recorded_color({}), DEFAULT_COLOR, 512)
    assert problem is not None
    assert (
        "icc_profile: ignore, hdr: keep, and the run has icc_profile: srgb, hdr: reject"
        in problem[0]
    )
    assert "--latents MODEL --resolution 512 --icc-profile srgb --hdr reject`" in problem[1]
