"""What it costs to pack images one by one as they arrive, with SQS and Lambda."""

from __future__ import annotations

from decimal import Decimal

from sm_train.cost.services import service_prices
from sm_train.entrypoints.storage.stream_upload import PART_BYTES

STAGING_GETS = 4
"""Requests to stage an image at the price of a GET: whether it is known, the image, its caption,
and whether it still has the same version."""

COLUMN_GETS = 1
"""Requests at the price of a GET for an image with columns: its sidecar file, or its tags."""

GIVEN_GETS, GIVEN_PUTS = 1, 1
"""Requests to write a caption next to an image: whether it has one of another extension, and it."""

SEALING_GETS = 2
"""Requests to seal a sample at the price of a GET: whether it is known, and the sample."""

PUTS = 2
"""Requests for an image at the price of a PUT: its sample, and the mark that it is known."""

SQS_REQUESTS = Decimal("1.2")
"""S3 sends a message for each image. Lambda receives and deletes them ten at a time."""

MEMORY_GB = Decimal(3008) / 1024
"""Memory of each function of the template."""

STAGING_SECONDS, SEALING_SECONDS = Decimal("0.015"), Decimal("0.011")
"""Time of a function for an image of 0.3 MB, if S3 does not limit it: 25 and 18 ms of a processor
(benchmarks/stream.py, 2026-11), of which a function of 3008 MB has 1.7."""


def streaming_usd(
    images: int,
    image_bytes: int,
    shard_bytes: int,
    *,
    has_columns: bool = False,
    given_files: int = 0,
) -> Decimal:
    """Return what it costs to pack ``images``, which together have ``image_bytes``.

    ``given_files`` are written next to each of them before.

    Prices are those of us-east-1. Storage of the shards, and of staged samples for less than a day,
    is not included; nor is the index: one request a shard and some minutes of a function a day.
    """
    prices = {name: price.usd for name, price in service_prices().items()}
    shards = -(-image_bytes // shard_bytes)
    parts = -(-image_bytes // PART_BYTES)  # each at the price of a PUT
    listings = -(-images // 1000)
    seconds = images * (STAGING_SECONDS + SEALING_SECONDS)
    gets = STAGING_GETS + SEALING_GETS + COLUMN_GETS * has_columns + GIVEN_GETS * given_files
    puts = PUTS + GIVEN_PUTS * given_files
    return (
        images * gets * prices["s3_get"]
        + (images * puts + parts + listings + 10 * shards) * prices["s3_put"]
        + images * SQS_REQUESTS * prices["sqs_request"]
        + seconds * MEMORY_GB * prices["lambda_compute"]
        + images * prices["lambda_request"] / 100
    )
