"""What would go wrong, or cost more than it should, found before money is spent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sm_train.cost.estimate import Estimate
from sm_train.cost.json_document import as_document
from sm_train.entrypoints.data.shard_format import ShardError
from sm_train.entrypoints.data.shard_index import ShardIndex
from sm_train.estimators.config.naming import staging_bucket
from sm_train.estimators.config.placement import Placement, placements, unique_placements
from sm_train.estimators.config.schema import RunConfig
from sm_train.toolkit.aws.errors import translate_aws_errors
from sm_train.toolkit.aws.s3 import split_uri
from sm_train.toolkit.aws.session import account_of, for_region
from sm_train.toolkit.checks import storage
from sm_train.toolkit.checks.budget import money_elsewhere, money_findings
from sm_train.toolkit.checks.checkpoints import checkpoint_findings
from sm_train.toolkit.checks.fallbacks import data_findings, fallback_findings, found_at
from sm_train.toolkit.checks.finding import LEVELS, Finding
from sm_train.toolkit.checks.image import image_findings, registry_findings
from sm_train.toolkit.checks.local_data import read_local
from sm_train.toolkit.checks.memory import memory_findings
from sm_train.toolkit.checks.permissions import UNCHECKED, ask, attempt
from sm_train.toolkit.checks.quotas import default_runtime_findings, quota_findings
from sm_train.toolkit.checks.recovery import recovery_findings
from sm_train.toolkit.checks.role import ROLE_UNSET, role_findings
from sm_train.toolkit.checks.shards import Shards, of_index, shard_findings
from sm_train.toolkit.costing.run_price import estimate_run
from sm_train.toolkit.costing.worst_case import fallback_costs
from sm_train.toolkit.errors import UserError
from sm_train.toolkit.packing.shard_listing import ShardListing


@dataclass(frozen=True)
class Subject:
    """What is looked at: a run, its estimate, and its shards as this machine knows them.

    ``base`` is the run file's folder; ``index`` is an index file that stands in for the shards.
    """

    config: RunConfig
    region: str
    costs: Estimate
    base: Path
    index: Path | None = None


def offline_findings(subject: Subject, today: date) -> list[Finding]:
    """What run file, prices and the shards on this machine say.

    Raises:
        UserError: the index cannot be read.
    """
    shards, wrong = _shards_here(subject, needed=True)
    found = [*_described(subject, today), *wrong, *default_runtime_findings(subject.config)]
    if shards is not None:
        found += _dealt(subject, shards)
    return _gravest_first(found)


def online_findings(
    subject: Subject, session: Any, today: date, progress: storage.Progress
) -> list[Finding]:
    """The same with what AWS says; shards in S3 count before those here.

    Raises:
        UserError: the index cannot be read, or the credentials are not valid (exit code 4).
    """
    config, region = subject.config, subject.region
    account = account_of(session)
    with translate_aws_errors("AWS"):
        shards, wrong = _shards_here(subject, needed=False)
        found = [*_described(subject, today), *wrong]
        found += attempt(
            "the role", "role", "iam:GetRole", role_findings(config.role, session, account)
        )
        found += _quotas(config, session, region)
        found += attempt(
            "the image",
            "cluster.image",
            "ecr:DescribeImages",
            registry_findings(config, session, region),
        )
        listings: dict[int, ShardListing] = {}
        found += _stored(subject, session, shards, progress, listings)
        for place in placements(config, region)[1:]:
            there = for_region(session, place.region)
            found += found_at(place, _quotas(place.config, there, place.region))
            found += _elsewhere(subject, place, there, progress, listings)
    return _gravest_first(found)


def _quotas(config: RunConfig, session: Any, region: str) -> list[Finding]:
    """By the account's quotas; by the default where those are not told."""
    found = list(
        attempt(
            "the quotas",
            "cluster",
            "servicequotas:ListServiceQuotas",
            quota_findings(config, session, region),
        )
    )
    if any(one.code == UNCHECKED.code for one in found):
        found += default_runtime_findings(config)
    return found


def _described(subject: Subject, today: date) -> Iterator[Finding]:
    config, document = subject.config, as_document(subject.costs)
    yield from money_findings(config, document)
    yield from money_elsewhere(config, document, fallback_costs(config, subject.region))
    own, *others = unique_placements(config, subject.region)
    yield from memory_findings(own.config)
    for other in others:
        yield from found_at(other, memory_findings(other.config))
    yield from fallback_findings(config, subject.region)
    for place in placements(config, subject.region)[1:]:
        yield from found_at(place, _unlike(place, subject, today))
    yield from recovery_findings(config, document)
    yield from image_findings(config, subject.region, today)
    if config.role is None:
        yield ROLE_UNSET.found("warning", "role", "is not set", "submit needs the role's ARN")


def _unlike(place: Placement, subject: Subject, today: date) -> list[Finding]:
    """What there is to say of the image there, and was not said of the run's own."""
    own = {one.code for one in image_findings(subject.config, subject.region, today)}
    found = image_findings(place.config, place.region, today)
    return [one for one in found if one.code not in own]


def _elsewhere(
    subject: Subject,
    place: Placement,
    session: Any,
    progress: storage.Progress,
    listings: dict[int, ShardListing],
) -> Iterator[Finding]:
    """The image, buckets and shards of a fallback; in the run's own region they are its own."""
    if place.region == subject.region:
        return
    yield from found_at(
        place,
        attempt(
            "the image",
            place.where,
            "ecr:DescribeImages",
            registry_findings(place.config, session, place.region),
        ),
    )
    there = Subject(
        place.config,
        place.region,
        estimate_run(place.config, place.region, stated=subject.config),
        subject.base,
    )
    found = _stored(there, session, None, progress, listings, place.number)
    yield from found_at(place, found)
    if 0 in listings and place.number in listings:
        yield from data_findings(place, listings[0], listings[place.number])


def _shards_here(subject: Subject, *, needed: bool) -> tuple[Shards | None, list[Finding]]:
    if subject.index is not None:
        try:
            return of_index(ShardIndex(subject.index), "--index"), []
        except ShardError as error:
            raise UserError(f"--index: {error}") from None
    if subject.config.data.local is None:
        return None, []
    folder = subject.base / subject.config.data.local
    if not folder.is_dir() and not needed:  # another laptop has them
        return None, []
    return read_local(folder)


def _dealt(subject: Subject, shards: Shards) -> Iterator[Finding]:
    document = as_document(subject.costs)
    return shard_findings(shards, document, subject.config.training.decode_workers)


def _stored(
    subject: Subject,
    session: Any,
    here: Shards | None,
    progress: storage.Progress,
    listings: dict[int, ShardListing],
    place: int = 0,
) -> Iterator[Finding]:
    """Buckets, and what lies in those that may be looked into; ``listings`` gets the shards."""
    config, region = subject.config, subject.region
    closed: set[str] = set()
    for bucket, where in storage.buckets(config, region).items():
        found = list(
            attempt(
                f"bucket {bucket}",
                where,
                "s3:ListBucket",
                storage.bucket_findings(session, region, bucket, where),
            )
        )
        yield from found
        if found:
            closed.add(bucket)
    yield from _data(subject, session, here, progress, closed, listings, place)
    yield from attempt(
        "a channel's prefix",
        "data.validation, model.components",
        "s3:ListBucket",
        storage.prefix_findings(config, session, closed),
    )
    # At a fallback earlier checkpoints are the run's own: they are copied there.
    if (
        place == 0
        and storage.knows_its_bucket(config)
        and staging_bucket(config, region) not in closed
    ):
        yield from attempt(
            "earlier checkpoints",
            "name",
            "s3:GetObject and sagemaker:ListTrainingJobs",
            checkpoint_findings(config, session, region),
        )


def _data(
    subject: Subject,
    session: Any,
    here: Shards | None,
    progress: storage.Progress,
    closed: set[str],
    listings: dict[int, ShardListing],
    place: int,
) -> Iterator[Finding]:
    """The shards in S3; those here where S3 does not tell."""
    config = subject.config
    listing = None
    if split_uri(config.data.uri)[0] not in closed:
        listing, refused = ask(
            "the shards",
            "data.uri",
            "s3:ListBucket",
            lambda: storage.list_data(config, session, progress),
        )
        yield from refused
    if listing is None:
        if here is not None:
            yield from _dealt(subject, here)
        return
    listings[place] = listing
    yield from storage.listing_findings(config, listing)
    if listing.shards:
        yield from _dealt(subject, storage.shards_in_s3(config, listing, here))
    known = _names_and_bytes(subject.index) if subject.index else None
    yield from attempt(
        "the index",
        "data.index",
        "s3:GetObject",
        storage.index_findings(config, session, listing, known),
    )


def _names_and_bytes(path: Path) -> dict[str, int]:
    index = ShardIndex(path)
    return dict(zip(index.names, index.bytes.tolist(), strict=True))


def _gravest_first(found: list[Finding]) -> list[Finding]:
    return sorted(dict.fromkeys(found), key=lambda one: LEVELS.index(one.level))
