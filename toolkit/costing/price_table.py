"""The prices that estimates use: shipped, read from AWS and kept here, or from one's own file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_train.cost.prices import PriceError, PriceRow, PriceTable, shipped_prices
from sm_train.entrypoints.common.atomic_write import write_atomic
from sm_train.toolkit.errors import UserError

if TYPE_CHECKING:
    import boto3

DEFAULT_REGION = "us-east-1"
"""Whose prices count where nothing says a region."""

_VERSION = 1


def price_table(own: Path | None = None) -> PriceTable:
    """The shipped prices, under those kept from AWS, under those of the file ``own``.

    Raises:
        UserError: a file cannot be used; the message names the place and the mend.
    """
    table = kept_prices().over(shipped_prices())
    if own is None:
        return table
    from sm_train.cost.price_file import read_price_file

    try:
        return read_price_file(own).over(table)
    except PriceError as error:
        raise UserError(f"--prices: {error}") from None
    except FileNotFoundError:
        raise UserError(f"--prices: {own}: no such file") from None


def cache_path() -> Path:
    """Where prices that were read from AWS are kept."""
    base = os.environ.get("XDG_CACHE_HOME")  # XDG Base Directory specification
    return (Path(base) if base else Path.home() / ".cache") / "sm-train" / "prices.json"


def kept_prices() -> PriceTable:
    """What was read from AWS before; empty without any.

    Raises:
        UserError: the file is damaged.
    """
    path = cache_path()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']}")
        return PriceTable.of(map(_row, document["rows"]), listed=document["listed"])
    except FileNotFoundError:
        return PriceTable.of([])
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise UserError(
            f"{path}: damaged price cache ({error}); delete it, and `sm-train cost --refresh` "
            "writes it anew"
        ) from None


def refresh(session: boto3.Session, region: str, today: date) -> PriceTable:
    """Read every training price of ``region`` from AWS's Price List API and keep it.

    Raises:
        UserError: AWS refuses, or its answer holds no training prices for the region.
    """
    from sm_train.toolkit.aws.errors import translate_aws_errors

    rows: list[PriceRow] = []
    with translate_aws_errors("GetProducts"):
        # The Price List API answers in few regions; this one is always among them.
        pages = session.client("pricing", region_name="us-east-1").get_paginator("get_products")
        for page in pages.paginate(
            ServiceCode="AmazonSageMaker",
            Filters=[{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
        ):
            rows += _parsed(page, "GetProducts")
    if not rows:
        raise UserError(f"region: AWS's price list has no training price for {region}; check it")
    # Asked today: the list's own date is when its last figure changed.
    return _keep([_dated(row, today) for row in rows], {region: today.isoformat()})


def import_price_lists(paths: Iterable[Path]) -> PriceTable:
    """Keep the prices of downloaded price lists, whichever of AWS's shapes they have.

    Raises:
        UserError: a file is no price list or holds no training price.
    """
    rows: list[PriceRow] = []
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"--price-list: {path}: no such file") from None
        except ValueError:
            raise UserError(f"--price-list: {path}: not JSON; give the .json offer file") from None
        found = _parsed(document, f"--price-list: {path}")
        if not found:
            raise UserError(f"--price-list: {path}: holds no price of SageMaker training")
        rows += found
    return _keep(rows, {})


def _parsed(document: Any, place: str) -> list[PriceRow]:
    from sm_train.cost.price_list import parse_price_list

    try:
        return parse_price_list(document)
    except PriceError as error:
        raise UserError(f"{place}: {error}") from None


def _dated(row: PriceRow, today: date) -> PriceRow:
    return PriceRow(**{**asdict(row), "date": today.isoformat()})


def _keep(rows: list[PriceRow], listed: dict[str, str]) -> PriceTable:
    """Lay ``rows`` over what is kept; the table of all that is kept now."""
    table = PriceTable.of(rows, listed=listed).over(kept_prices())
    document = {
        "version": _VERSION,
        "listed": dict(table.listed),
        "rows": [
            asdict(row) | {"usd_per_hour": str(row.usd_per_hour)} for row in table.rows.values()
        ],
    }
    path = cache_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(document, indent=1) + "\n").encode())
    return table


def _row(fields: dict[str, Any]) -> PriceRow:
    return PriceRow(**{**fields, "usd_per_hour": Decimal(fields["usd_per_hour"])})
