"""The price table of estimates: shipped prices, cached AWS prices, and the user's own file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.price_file import read_price_file
from sm_train.cost.price_list import parse_price_list
from sm_train.cost.prices import PriceError, PriceRow, PriceTable, shipped_prices
from sm_train.entrypoints.base.atomic_write import write_atomic
from sm_train.toolkit.base.errors import UserError

if TYPE_CHECKING:
    import boto3


_VERSION = 1


def price_table(user_file: Path | None = None) -> PriceTable:
    """Merge prices: ``user_file`` overrides cached AWS prices, which override shipped ones.

    Raises:
        UserError: a file cannot be read.
    """
    table = cached_prices().over(shipped_prices())
    if user_file is None:
        return table

    try:
        return read_price_file(user_file).over(table)
    except PriceError as error:
        raise UserError(f"--prices: {error}") from None
    except FileNotFoundError:
        raise UserError(f"--prices: {user_file}: no such file") from None


def cache_path() -> Path:
    """Return the file of cached AWS prices."""
    base = os.environ.get("XDG_CACHE_HOME")  # XDG Base Directory specification
    return (Path(base) if base else Path.home() / ".cache") / "sm-train" / "prices.json"


def cached_prices() -> PriceTable:
    """Return the cached AWS prices; an empty table if there are none.

    Raises:
        UserError: the cache is damaged.
    """
    path = cache_path()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}")
        return PriceTable.of(map(_row, document["rows"]), listed=document["listed"])
    except FileNotFoundError:
        return PriceTable.of([])
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise UserError(
            f"{path}: damaged price cache ({error}); delete it and run `sm-train cost --refresh`"
        ) from None


def fetch_prices(session: boto3.Session, region: str, today: date) -> PriceTable:
    """Fetch all training prices of ``region`` from the AWS Price List API and cache them.

    Raises:
        UserError: AWS refuses the request, or lists no training price for the region.
    """
    from sm_train.toolkit.aws.aws_errors import translate_aws_errors

    rows: list[PriceRow] = []
    with translate_aws_errors("GetProducts"):
        # The Price List API has endpoints in a few regions only; us-east-1 is one.
        pages = session.client("pricing", region_name="us-east-1").get_paginator("get_products")
        for page in pages.paginate(
            ServiceCode="AmazonSageMaker",
            Filters=[{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
        ):
            rows += _parse(page)
    if not rows:
        raise UserError(f"region: AWS's price list has no training price for {region}; check it")
    # Dated today: the list's own date is that of its last change.
    return store_prices([_with_date(row, today) for row in rows], {region: today.isoformat()})


def _parse(page: Any) -> list[PriceRow]:
    try:
        return parse_price_list(page)
    except PriceError as error:
        raise UserError(f"GetProducts: {error}") from None


def _with_date(row: PriceRow, today: date) -> PriceRow:
    return PriceRow(**{**asdict(row), "date": today.isoformat()})


def store_prices(rows: list[PriceRow], listed: dict[str, str]) -> PriceTable:
    """Add ``rows`` to the cache, replacing older prices; return the merged table.

    ``listed`` are the regions whose complete list the rows are, with its date.
    """
    table = PriceTable.of(rows, listed=listed).over(cached_prices())
    document = {
        "version": _VERSION,
        "listed": dict(table.listed),
        "rows": [
            asdict(row) | {"usd_per_hour": row.usd_per_hour and str(row.usd_per_hour)}
            for row in table.rows.values()
        ],
    }
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(document, indent=1) + "\n").encode())
    return table


def _row(fields: dict[str, Any]) -> PriceRow:
    usd = fields["usd_per_hour"]
    return PriceRow(**{**fields, "usd_per_hour": None if usd is None else Decimal(usd)})
