"""Collects what training sees of its data sets: samples as the loader gives them, and counts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sm_train.entrypoints.base.error import Error
from sm_train.entrypoints.job_interface.job_config import ColorPolicy, DataConfig
from sm_train.entrypoints.sample_metadata.color_counts import ColorCounts
from sm_train.entrypoints.sample_metadata.row_filter import ConditionError
from sm_train.entrypoints.script.folder_data import folder_config
from sm_train.entrypoints.shards.shard_format import DataError, ShardError
from sm_train.entrypoints.shards.shard_index import ShardIndex, count_rejected
from sm_train.entrypoints.storage.store import S3Access
from sm_train.estimators.config.data import SourceSection
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.config.stage import StageSection
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.data_prep.data_preview.drawn_samples import (
    DrawnSample,
    copy_samples,
    draw_samples,
)
from sm_train.toolkit.data_prep.data_preview.loaded_crops import (
    LoadedCrop,
    UnusableSample,
    load_crops,
)
from sm_train.toolkit.data_prep.packing.shard_set import find_shard_set
from sm_train.toolkit.run_file.run_file import RUN_FILE_ENDINGS, load

_TRAIN = "train"
_OF_CHANNELS = frozenset(("CMYK", "gray", "Lab"))
"""Names of profiles that only images of these channels can have."""

_RESOLUTION = 512
"""Pixels of a crop without a run file."""

_SIDES = (256, 512, 768, 1024, 1536, 2048, 4096)
"""Shorter sides in pixels that divide the histogram of sizes."""


@dataclass(frozen=True)
class PreviewSource:
    """A data set that a stage reads: its address, and how its samples are read.

    ``code`` is the folder of the run's own code, and ``region`` the run's.
    """

    address: str
    config: DataConfig
    resolution: int
    code: Path | None = None
    region: str | None = None


@dataclass(frozen=True)
class SeenSample:
    """A sample as training gets it, and what its image states about its colors.

    ``conversion`` says what became of these.
    """

    crop: LoadedCrop
    conversion: str
    columns: dict[str, Any]


@dataclass(frozen=True)
class PreviewedSet:
    """A data set as training sees it.

    ``samples`` are those that training reads, of ``indexed`` ones. ``profiles``, ``depths``,
    ``sides`` (the shorter side of each image) and ``rejected`` count all images of the index,
    ``shapes`` the drawn crops.
    """

    source: PreviewSource
    samples: int
    indexed: int
    seen: list[SeenSample]
    unusable: list[UnusableSample]
    profiles: dict[str, int]
    depths: dict[str, int]
    sides: dict[str, int]
    shapes: dict[str, int]
    rejected: dict[str, int]
    enlarged: int
    warnings: list[str]


def preview_sources(
    target: str, stage: str | None, resolution: int | None, where: str | None
) -> list[PreviewSource]:
    """Return the data sets of a run file, or the one that ``target`` is, with these settings.

    Raises:
        UserError: the run file is invalid, has no such stage, or makes up its samples.
    """
    if Path(target).is_file() and Path(target).suffix in RUN_FILE_ENDINGS:
        sources = _sources_of_run(Path(target), stage, where)
        if resolution is not None:
            sources = [replace(source, resolution=resolution) for source in sources]
        return sources
    if stage is not None:
        raise UserError("--stage: needs a run file")
    # Without a run file, the defaults of `ShardDataset` hold.
    config = folder_config({"where": where})
    return [PreviewSource(target, config, resolution or _RESOLUTION)]


def _sources_of_run(path: Path, stage: str | None, where: str | None) -> list[PreviewSource]:
    """Return the data sets that a stage of a run file reads; its folders here come first.

    Raises:
        UserError: the run file is invalid, has no such stage, or makes up its samples.
    """
    config = load(path)
    chosen = _stage(config, stage)
    if config.data.synthetic_samples:
        raise UserError(f"{path}: data.synthetic_samples: there are no images to show")
    data = config.data.job_config()
    code = None if config.code is None else path.parent / config.code
    found = []
    named: list[SourceSection | None] = [*config.sources_of(chosen)]
    for source in named or [None]:
        channel = _TRAIN if source is None else source.channel
        place: Any = config.data if channel == _TRAIN else config.channels[channel]
        own = None if source is None else source.where
        conditions = [text for text in (own or data.where, where) if text]
        both = " and ".join(f"({text})" for text in conditions)
        condition = both if len(conditions) > 1 else next(iter(conditions), None)
        local = None if place.local is None else path.parent / place.local
        address = str(local) if local is not None and local.exists() else place.uri
        if address is None:
            raise UserError(f"{path}: no data to show; set data.uri or data.local")
        settings = replace(data, where=condition)
        found.append(PreviewSource(address, settings, chosen.resolution, code, config.region))
    return found


def _stage(config: RunConfig, name: str | None) -> StageSection:
    names = [stage.name for stage in config.stages]
    if name is not None and name not in names:
        raise UserError(f"--stage: {name}: no such stage; the run has {', '.join(names)}")
    return config.stages[0 if name is None else names.index(name)]


def preview_set(source: PreviewSource, count: int, seed: int, access: S3Access) -> PreviewedSet:
    """Draw ``count`` samples of a data set, decode them as training does, and count the rest.

    Raises:
        UserError: it has no index, no sample fulfils the condition, or PyTorch is not installed.
    """
    shards = find_shard_set(source.address, access)
    with shards.open_index() as (index, _), TemporaryDirectory(prefix="sm-train-data-") as folder:
        copies = Path(folder) / "shards"
        copies.mkdir()
        try:
            where = source.config.where
            total, chosen = draw_samples(index, shards.read_list(), where, count, seed)
        except ConditionError as error:
            raise UserError(f"{source.address}: {error}") from None
        drawn = {
            (item.shard, item.key): item for item in copy_samples(shards, index, chosen, copies)
        }
        seen, unusable = _load(source, copies, seed, drawn)
        return _described(source, index, total, seen, unusable)


def _load(
    source: PreviewSource, copies: Path, seed: int, drawn: dict[tuple[str, str], DrawnSample]
) -> tuple[list[SeenSample], list[UnusableSample]]:
    seen, unusable = [], []
    try:
        with _importable(source.code):
            for item in load_crops(copies, source.config, source.resolution, seed, len(drawn)):
                if isinstance(item, UnusableSample):
                    unusable.append(item)
                    continue
                facts = drawn.get((item.shard, item.key))
                code = None if facts is None else facts.color
                columns = {} if facts is None else facts.columns
                seen.append(SeenSample(item, _conversion(code, source.config.color), columns))
    except Error:
        raise
    except ShardError as error:
        raise UserError(f"{source.address}: {error}") from None
    except DataError as error:
        # Of all samples that are left none can be used; the page still has the counts.
        shown = {(item.crop.shard, item.crop.key) for item in seen}
        shown |= {(bad.shard, bad.key) for bad in unusable}
        unusable += [
            UnusableSample(shard, key, "unusable", str(error))
            for shard, key in drawn
            if (shard, key) not in shown
        ]
    return seen, unusable


@contextmanager
def _importable(code: Path | None) -> Iterator[None]:
    """Let ``data.transform`` import the run's own code; it prints to stderr."""
    if code is None:
        yield
        return
    sys.path.insert(0, str(code))
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path.remove(str(code))


def _conversion(code: str | None, policy: ColorPolicy) -> str:
    """Return what becomes of the colors that an image states."""
    if code is None:
        return "unknown colors"
    profile, channels, *_ = code.split("/")
    counts = ColorCounts.of({code: 1})
    stated = "no profile" if profile == "none" else profile
    if channels == "CMYK" and profile != "CMYK":
        return f"CMYK, {stated}"
    if counts.hdr:
        return f"{stated}, HDR, levels as stored"
    if counts.unconverted:
        [signal] = counts.unconverted
        return f"{stated}; {signal} is not converted"
    if profile in ("none", "sRGB"):
        return "no profile, taken as sRGB" if profile == "none" else profile
    fits = profile == channels if profile in _OF_CHANNELS else profile != "other"
    if policy.icc_profile == "srgb" and fits:
        return f"{stated} → sRGB"
    return f"{stated}, levels as stored"


def _described(
    source: PreviewSource,
    index: ShardIndex,
    samples: int,
    seen: list[SeenSample],
    unusable: list[UnusableSample],
) -> PreviewedSet:
    counts = ColorCounts.of(index.header.colors)
    sides: Counter[int] = Counter()
    enlarged = 0
    for _, widths, heights in index.image_sizes_by_group(np.arange(len(index))):
        shorter = np.minimum(widths, heights)
        shorter = shorter[shorter > 0]  # of an image that cannot be read
        enlarged += int((shorter < source.resolution).sum())
        numbers, found = np.unique(np.searchsorted(_SIDES, shorter, "right"), return_counts=True)
        sides.update(dict(zip(numbers.tolist(), found.tolist(), strict=True)))
    warnings = [f"{found}; {fix}" for _, found, fix in counts.distortions(source.config.color)]
    measured = sides.total()
    if enlarged:
        share = enlarged / measured
        warnings.append(
            f"{enlarged:,} of {measured:,} images ({share:.0%}) have a shorter side below "
            f"{source.resolution} px and are enlarged; pack with --min-side {source.resolution}"
        )
    shapes = Counter(f"{item.crop.pixels.shape[1]} × {item.crop.pixels.shape[0]}" for item in seen)
    return PreviewedSet(
        source,
        samples,
        index.header.samples,
        seen,
        unusable,
        counts.profiles,
        {f"{bits} bits": number for bits, number in counts.depths.items()},
        {_side_name(number): sides[number] for number in sorted(sides)},
        dict(shapes.most_common()),
        count_rejected(index.rejected()),
        enlarged,
        warnings,
    )


def _side_name(number: int) -> str:
    if number == 0:
        return f"below {_SIDES[0]} px"
    if number == len(_SIDES):
        return f"{_SIDES[-1]:,} px and more"
    return f"{_SIDES[number - 1]:,} to {_SIDES[number] - 1:,} px"
