"""Prices: precedence, sources, staleness, and rejected files."""

from __future__ import annotations

import copy
from contextlib import suppress
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm_train.cost.instances import instance_types
from sm_train.cost.price_file import read_price_file
from sm_train.cost.price_list import parse_price_list
from sm_train.cost.prices import (
    KINDS,
    PriceError,
    PriceRow,
    PriceTable,
    shipped_prices,
    staleness,
)

from tests.cost.prices_support import get_products, product

P5 = "ml.p5.48xlarge"


def test_a_price_has_its_region_and_date() -> None:
    item = product("USE1-Train:ml.p5.48xlarge", regionCode="us-east-1")
    [price] = parse_price_list(get_products(item))
    assert (price.instance_type, price.region, price.kind) == (P5, "us-east-1", "on-demand")
    assert price.usd_per_hour == Decimal("63.296")
    assert price.date == "2026-09-24"


def test_usage_type_identifies_training() -> None:
    found = parse_price_list(
        get_products(
            product("Train:ml.p5.48xlarge", instanceType="NA"),
            product("EUN1-Train:ml.p5.48xlarge", instanceType="ml.p5.48xlarge-Training"),
            product("USW2-TrSpt:ml.p5.48xlarge", component="Training"),
            product("USW2-Cluster:ml.p5.48xlarge", component="Cluster"),
            product("USW2-ReservedCluster:ml.p5.48xlarge", component="Cluster"),
            product("USW2-Host:ml.p5.48xlarge", component="Training"),
            product("USW2-Studio:JupyterLab-ml.p5.48xlarge"),
        )
    )
    assert [(row.region, row.kind) for row in found] == [
        ("us-east-1", "on-demand"),
        ("eu-north-1", "on-demand"),
        ("us-west-2", "spot"),
        ("us-west-2", "hyperpod-on-demand"),
    ]


def test_processing_prices_are_separate() -> None:
    """Also for types that no training job can have."""
    usage = "USE1-Processing:ml.c7i.8xlarge"
    table = PriceTable.of(parse_price_list(get_products(product(usage, regionCode="us-east-1"))))
    assert table.processing_price("ml.c7i.8xlarge", "us-east-1").usd_per_instance_hour == Decimal(
        "63.296"
    )
    assert table.processing_price("ml.p5.48xlarge", "us-east-1").usd_per_instance_hour is None


@pytest.mark.parametrize(
    "document", [{}, [], None, {"terms": {}}, {"PriceList": ["{"]}, {"PriceList": [{}]}], ids=str
)
def test_rejects_invalid_price_lists(document: Any) -> None:
    with pytest.raises(PriceError):
        parse_price_list(document)


def test_rejects_other_currencies_by_name() -> None:
    item = product("CNN1-Train:ml.p5.48xlarge", regionCode="cn-north-1")
    broken = copy.deepcopy(item)
    dimension = broken["terms"]["OnDemand"]["SKU1.TERM"]["priceDimensions"]["SKU1.TERM.DIM"]
    dimension["pricePerUnit"] = {"CNY": "400"}
    with pytest.raises(PriceError, match="CNY; only USD"):
        parse_price_list(get_products(broken))


def test_user_prices_override_aws_prices_which_override_shipped(tmp_path: Path) -> None:
    aws = PriceTable.of(
        [PriceRow(P5, "us-east-1", "on-demand", Decimal(60), "verified", "AWS", "2026-11-01")],
        listed={"us-east-1": "2026-11-01"},
    ).over(shipped_prices())
    assert aws.price(P5, "us-east-1").usd_per_instance_hour == 60
    file = tmp_path / "prices.csv"
    file.write_text("instance_type,usd_per_hour,date\nml.p5.48xlarge,50.5,2026-11-02\n")
    own = read_price_file(file).over(aws).price(P5, "us-east-1")
    assert own.usd_per_instance_hour == Decimal("50.5")
    assert str(file) in own.source


def test_upper_table_takes_precedence() -> None:
    row = PriceRow(P5, "us-east-1", "on-demand", Decimal(60), "verified", "AWS", "2026-11-01")
    upper = PriceTable.of([row])
    assert upper.over(shipped_prices()).price(P5, "us-east-1").usd_per_instance_hour == 60
    below = shipped_prices().over(upper).price(P5, "us-east-1").usd_per_instance_hour
    assert below == Decimal("63.296")


def test_discount_applies_to_any_list_price(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("instance_type,discount_percent,source\n*,12.5,our contract\n")
    table = read_price_file(file).over(shipped_prices())
    for name in (P5, "ml.g5.48xlarge"):
        before = shipped_prices().price(name, "us-west-2").usd_per_instance_hour
        after = table.price(name, "us-west-2")
        assert before is not None
        assert after.usd_per_instance_hour == before * Decimal("0.875")
        assert "12.5 % off (our contract)" in after.source
    assert table.price("ml.p5e.48xlarge", "us-west-2").usd_per_instance_hour is None


def test_type_missing_from_a_complete_list_is_not_offered() -> None:
    table = PriceTable.of([], listed={"eu-west-3": "2026-11-01"}).over(shipped_prices())
    missing = table.price(P5, "eu-west-3")
    assert missing.usd_per_instance_hour is None
    assert "not offered" in missing.source
    listed = PriceTable.of([], listed={"us-east-1": "2026-11-01"}).over(shipped_prices())
    assert listed.price(P5, "us-east-1").usd_per_instance_hour is None
    assert table.price(P5, "eu-north-1").status == "derived"


MISTAKES = {
    "no type column": ("usd_per_hour\n1\n", "column instance_type is missing"),
    "no amount column": ("instance_type\nml.p5.48xlarge\n", "column usd_per_hour"),
    "another column": ("instance_type,usd_per_hour,x\n", "unknown column 'x'"),
    "no rows": ("instance_type,usd_per_hour\n", "holds no prices"),
    "two currencies": (
        "instance_type,usd_per_hour,currency\nml.p5.48xlarge,1,USD\nml.p4d.24xlarge,1,EUR\n",
        ":3: currency: 'EUR'",
    ),
    "no such type": ("instance_type,usd_per_hour\nml.p9,1\n", ":2: instance_type: 'ml.p9'"),
    "no number": ("instance_type,usd_per_hour\nml.p5.48xlarge,a\n", ":2: usd_per_hour: 'a'"),
    "not finite": ("instance_type,usd_per_hour\nml.p5.48xlarge,NaN\n", "usd_per_hour: 'NaN'"),
    "negative": ("instance_type,usd_per_hour\nml.p5.48xlarge,-1\n", "usd_per_hour: '-1'"),
    "over all": ("instance_type,discount_percent\n*,101\n", "discount_percent: '101'"),
    "both": (
        "instance_type,usd_per_hour,discount_percent\n*,1,1\n",
        "either usd_per_hour or discount_percent",
    ),
    "a price for all": ("instance_type,usd_per_hour\n*,1\n", "needs one instance type"),
    "no day": ("instance_type,usd_per_hour,date\nml.p5.48xlarge,1,today\n", "date: 'today'"),
    "no kind": ("instance_type,usd_per_hour,kind\nml.p5.48xlarge,1,rent\n", "kind: 'rent'"),
    "too many values": ("instance_type,usd_per_hour\nml.p5.48xlarge,1,2\n", "more values"),
    "empty": ("", "column instance_type is missing"),
    "no CSV": (f"instance_type,usd_per_hour\nml.p5.48xlarge,{'1' * 200_000}\n", "not CSV: field"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects_price_file_with_its_line(tmp_path: Path, mistake: str) -> None:
    text, expected = MISTAKES[mistake]
    file = tmp_path / "prices.csv"
    file.write_text(text)
    with pytest.raises(PriceError) as caught:
        read_price_file(file)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=80))
def test_any_file_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("prices") / "prices.csv"
    file.write_bytes(b"instance_type,usd_per_hour\n" + content)
    with suppress(PriceError):
        assert all(row.usd_per_hour is not None for row in read_price_file(file).rows.values())


def test_reports_old_and_undated_prices() -> None:
    row = PriceRow(P5, "*", "on-demand", Decimal(1), "verified", "x", "2026-08-01")
    price = PriceTable.of([row]).price(P5, "us-east-1")
    assert staleness(price, date(2026, 10, 30)) is None
    assert "91 days old" in (staleness(price, date(2026, 10, 31)) or "")
    undated = shipped_prices().price("ml.p3.2xlarge", "us-east-1")
    assert "undated" in (staleness(undated, date(2026, 11, 1)) or "")


def test_rejects_unknown_purchase_kind() -> None:
    with pytest.raises(ValueError, match="'lease' is not one of on-demand, spot"):
        shipped_prices().price(P5, "us-east-1", "lease")
    assert all(shipped_prices().price(P5, "us-east-1", kind).source for kind in KINDS)


def test_every_training_type_has_a_row_and_every_row_a_source() -> None:
    from botocore.session import get_session

    types = get_session().get_service_model("sagemaker").shape_for("TrainingInstanceType").enum
    accelerated = {name for name in types if name.startswith(("ml.p", "ml.g", "ml.trn"))}
    assert accelerated == {kind.name for kind in instance_types()}
    rows = shipped_prices().rows.values()
    assert accelerated <= {row.instance_type for row in rows}
    for row in rows:
        assert row.source
        assert (row.usd_per_hour is None) == (row.status == "unknown")
        assert row.status in ("third-party", "derived", "unknown")


def test_processing_types_are_priced_in_every_region() -> None:
    table = shipped_prices()
    known = table.processing_price("ml.m5.4xlarge", "us-east-1")
    assert known.usd_per_instance_hour == Decimal("0.922")
    assert table.processing_price("ml.m5.4xlarge", "eu-west-1").status == "assumed"
