"""The page and the document of what training sees of its data."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from sm_train.toolkit.data_prep.data_preview.data_preview import PreviewedSet, SeenSample
from sm_train.toolkit.report_html.html_page import render

_QUALITY = 90
"""JPEG's quality of a crop on the page."""


def preview_page(sets: Sequence[PreviewedSet]) -> str:
    """Return the HTML page; it holds its images and loads nothing."""
    return render("data_preview.html", title="What training sees", sets=[*map(_section, sets)])


def _section(preview: PreviewedSet) -> dict[str, Any]:
    color = preview.source.config.color
    return {
        "address": preview.source.address,
        "where": preview.source.config.where,
        "samples": f"{preview.samples:,}",
        "indexed": f"{preview.indexed:,}",
        "settings": f"{preview.source.resolution} px, crop: {preview.source.config.crop}, {color}",
        "warnings": preview.warnings,
        "histograms": [
            {"title": title, "rows": _bars(counts)}
            for title, counts in (
                ("Color profiles", preview.profiles),
                ("Depths", preview.depths),
                ("Shorter side", preview.sides),
                ("Shapes of the crops below", preview.shapes),
                ("Rejected when packed", preview.rejected),
            )
            if counts
        ],
        "unusable": preview.unusable,
        "cards": [*map(_card, preview.seen)],
    }


def _bars(counts: Mapping[str, int]) -> list[tuple[str, str, int, float]]:
    """Return name, number, count and percent of the largest of each row."""
    largest = max(counts.values())
    return [(name, f"{n:,}", n, round(100 * n / largest, 1)) for name, n in counts.items()]


def _card(sample: SeenSample) -> dict[str, Any]:
    crop = sample.crop
    height, width = crop.pixels.shape[:2]
    return {
        "image": _data_url(crop.pixels),
        "name": f"{PurePosixPath(crop.shard).name} {crop.key}",
        "caption": crop.caption,
        "size": f"{crop.width} × {crop.height} → {width} × {height}",
        "corner": f"left {crop.left}, top {crop.top} of the scaled image",
        "conversion": sample.conversion,
        "columns": {
            name: "" if value is None else str(value) for name, value in sample.columns.items()
        },
        "width": width,
        "height": height,
    }


def _data_url(pixels: Any) -> str:
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()


def preview_document(sets: Sequence[PreviewedSet]) -> list[dict[str, Any]]:
    """Return the JSON document: for each data set, its counts and the drawn samples."""
    return [
        {
            "address": preview.source.address,
            "where": preview.source.config.where,
            "resolution": preview.source.resolution,
            "samples": preview.samples,
            "indexed": preview.indexed,
            "enlarged": preview.enlarged,
            "profiles": preview.profiles,
            "depths": preview.depths,
            "sides": preview.sides,
            "shapes": preview.shapes,
            "rejected": preview.rejected,
            "warnings": preview.warnings,
            "unusable": [vars(sample) for sample in preview.unusable],
            "seen": [_facts(sample) for sample in preview.seen],
        }
        for preview in sets
    ]


def _facts(sample: SeenSample) -> dict[str, Any]:
    crop = sample.crop
    return {
        "shard": crop.shard,
        "key": crop.key,
        "caption": crop.caption,
        "width": crop.width,
        "height": crop.height,
        "left": crop.left,
        "top": crop.top,
        "shape": list(crop.pixels.shape[:2]),
        "conversion": sample.conversion,
        "columns": {
            name: value if isinstance(value, bool | int | float | str | None) else str(value)
            for name, value in sample.columns.items()
        },
    }
