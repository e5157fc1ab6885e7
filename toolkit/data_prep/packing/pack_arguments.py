"""The arguments of ``sm-train pack`` and ``sm_train.pack``, and the job that they describe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from sm_train.entrypoints.data_prep.packing.plan import PackOptions
from sm_train.entrypoints.data_prep.packing.stored_plan import option_problems
from sm_train.entrypoints.job_interface.job_config import ColorPolicy, Hdr, IccProfile
from sm_train.entrypoints.models.components import ComponentsError, describe_latents
from sm_train.entrypoints.storage.store import S3Access
from sm_train.toolkit.aws.session import open_session, resolve_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.extras import require_extra
from sm_train.toolkit.data_prep.packing.pack import PackJob, parse_size
from sm_train.toolkit.data_prep.packing.tables import TableOptions


@dataclass(frozen=True, kw_only=True)
class PackArguments(TableOptions):
    """What a user states, by the names of the command's options; ``sm_train.pack`` describes them.

    ``instances`` are those of the stage that reads the shards.
    """

    source: str
    destination: str
    captions: str | None = None
    shard_size: str | int = "4GB"
    instances: int = 1
    min_side: int | None = None
    max_aspect: float | None = None
    drop_duplicates: bool = False
    near_duplicates: int | None = None
    max_side: int | None = None
    quality: int | None = None
    convert: bool = False
    latents: Path | None = None
    resolution: int | None = None
    icc_profile: IccProfile = ColorPolicy.icc_profile
    hdr: Hdr = ColorPolicy.hdr
    headers_only: bool = False
    append: bool = False
    removed: Sequence[str] = ()
    workers: int | None = None
    region: str | None = None
    profile: str | None = None

    def job(self, *, on_sagemaker: bool = False) -> PackJob:
        """Return the job, on this machine or on SageMaker Processing.

        Raises:
            UserError: arguments contradict each other, or credentials for S3 are missing.
        """
        if self.headers_only and self.near_duplicates is not None:
            raise UserError("--headers-only: excludes --near-duplicates, which compares pixels")
        if (self.latents is None) != (self.resolution is None):
            raise UserError("--latents: requires --resolution, and the reverse")
        if self.latents is not None and self.resolution is not None:
            _require_latents_model(self.latents, self.resolution, packs_locally=not on_sagemaker)
        size = self.shard_size
        shard_bytes = size if isinstance(size, int) else parse_size(size)
        options = PackOptions(
            pixels=not self.headers_only,
            min_side=self.min_side,
            max_aspect=self.max_aspect,
            max_side=self.max_side,
            quality=self.quality,
            convert=self.convert,
            duplicates=self.drop_duplicates or self.near_duplicates is not None,
            near_bits=self.near_duplicates,
            latents=None if self.latents is None else str(self.latents),
            latents_resolution=self.resolution,
            icc_profile=self.icc_profile,
            hdr=self.hdr,
        )
        for problem in option_problems(options, shard_bytes):
            raise UserError(f"--{problem}")
        table = {field.name: getattr(self, field.name) for field in fields(TableOptions)}
        return PackJob(
            source=self.source,
            destination=self.destination,
            captions=self.captions,
            shard_bytes=shard_bytes,
            table=TableOptions(**table),
            workers=self.workers or os.cpu_count() or 1,
            instances=self.instances,
            append=self.append,
            removed=tuple(self.removed),
            options=options,
            access=s3_access(
                (self.source, self.destination, self.captions or "", *self.removed),
                self.region,
                self.profile,
            ),
        )


def s3_access(addresses: Iterable[str], region: str | None, profile: str | None) -> S3Access:
    """Return how to reach S3; require credentials and a region only for an address in S3.

    Raises:
        UserError: one of them is missing.
    """
    if not any(address.startswith("s3://") for address in addresses):
        return S3Access(profile, region)  # a table may name s3:// URIs
    region = resolve_region(region, None, profile)
    open_session(profile, region)
    return S3Access(profile, region)


def _require_latents_model(model: Path, resolution: int, *, packs_locally: bool) -> None:
    try:
        describe_latents(model, resolution)
    except ComponentsError as error:
        raise UserError(f"--latents: {error}") from None
    if packs_locally:
        require_extra("train", "torch", "diffusers", purpose="encoding latents")
