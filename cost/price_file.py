"""Read a CSV file of negotiated prices or discounts.

Columns, in any order: ``instance_type`` (``*`` for all) and either ``usd_per_hour`` or
``discount_percent``; optional ``region`` (``*``), ``kind`` (on-demand), ``currency`` (USD),
``date`` (ISO) and ``source``.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path

from sm_train.cost.instances import UnknownInstanceTypeError, instance_type
from sm_train.cost.prices import (
    ANY,
    KINDS,
    ON_DEMAND,
    PROCESSING,
    Discount,
    PriceError,
    PriceRow,
    PriceTable,
)

_OPTIONAL = ("region", "kind", "currency", "date", "source")
_AMOUNTS = ("usd_per_hour", "discount_percent")


def read_price_file(path: Path) -> PriceTable:
    """Return the prices and discounts of the CSV file ``path``.

    Raises:
        PriceError: a column is missing or unknown, or a row's value is invalid; the message
            names the line.
        OSError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            _check_columns(path, list(reader.fieldnames or ()))
            rows = [(reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise PriceError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except csv.Error as error:
        raise PriceError(f"{path}: not CSV: {error}") from None
    if not rows:
        raise PriceError(f"{path}: holds no prices; write a row for each instance type")
    read = [_row(f"{path}:{line}", row, str(path)) for line, row in rows]
    return PriceTable.of(
        (record for record in read if isinstance(record, PriceRow)),
        (record for record in read if isinstance(record, Discount)),
    )


def _check_columns(path: Path, columns: list[str]) -> None:
    if "instance_type" not in columns:
        raise PriceError(f"{path}: column instance_type is missing; found {', '.join(columns)}")
    if not any(column in columns for column in _AMOUNTS):
        raise PriceError(f"{path}: column usd_per_hour (or discount_percent) is missing")
    unknown = [name for name in columns if name not in ("instance_type", *_AMOUNTS, *_OPTIONAL)]
    if unknown:
        known = ", ".join(("instance_type", *_AMOUNTS, *_OPTIONAL))
        raise PriceError(f"{path}: unknown column {unknown[0]!r}; known: {known}")


def _row(where: str, row: Mapping[str, str | None], file: str) -> PriceRow | Discount:
    if None in row:
        raise PriceError(f"{where}: more values than columns")
    cells = {name: (value or "").strip() for name, value in row.items()}
    name = cells["instance_type"]
    currency = cells.get("currency") or "USD"
    if currency != "USD":
        raise PriceError(f"{where}: currency: {currency!r}; only USD is supported; convert it")
    kind = cells.get("kind") or ON_DEMAND
    if kind not in (*KINDS, PROCESSING):
        known = ", ".join((*KINDS, PROCESSING))
        raise PriceError(f"{where}: kind: {kind!r} is not one of {known}")
    region, day = cells.get("region") or ANY, _day(where, cells.get("date", ""))
    source = cells.get("source") or file
    dollars, percent = cells.get("usd_per_hour", ""), cells.get("discount_percent", "")
    if bool(dollars) == bool(percent):
        raise PriceError(f"{where}: give either usd_per_hour or discount_percent")
    if name != ANY and kind != PROCESSING:
        try:
            instance_type(name)
        except UnknownInstanceTypeError as error:
            raise PriceError(f"{where}: instance_type: {error}") from None
    if percent:
        share = _amount(where, "discount_percent", percent, most=Decimal(100))
        return Discount(name, region, kind, share, source, day)
    if name == ANY:
        raise PriceError(f"{where}: usd_per_hour: needs one instance type, not *")
    amount = _amount(where, "usd_per_hour", dollars, most=Decimal(100_000))
    return PriceRow(name, region, kind, amount, "verified", source, day)


def _amount(where: str, field: str, text: str, most: Decimal) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not (amount.is_finite() and 0 <= amount <= most):
        raise PriceError(f"{where}: {field}: {text!r} must be a number from 0 to {most:,}")
    return amount


def _day(where: str, text: str) -> str | None:
    if not text:
        return None
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise PriceError(f"{where}: date: {text!r} must be a day such as 2026-09-01") from None
