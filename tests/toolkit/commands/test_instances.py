"""``instances``: types by GPU, with EFA and prices of a region or of all."""

from __future__ import annotations

import json

from sm_train.cost.prices import shipped_prices

from tests.conftest import Cli
from tests.support.run_files import one_line


def test_types_of_a_gpu_with_the_prices_of_a_region(cli: Cli) -> None:
    result = cli("instances", "--gpu", "h100", "--region", "us-west-2", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["region"] == "us-west-2"
    [instance] = [
        instance
        for instance in document["instances"]
        if instance["instance_type"] == "ml.p5.48xlarge"
    ]
    assert (instance["gpu"], instance["gpus"], instance["gpu_memory_gib"]) == (
        "H100-SXM5-80GB",
        8,
        80,
    )
    assert instance["efa_gbps"] == 3200
    price = shipped_prices().price("ml.p5.48xlarge", "us-west-2").usd_per_instance_hour
    assert price is not None
    assert instance["price_per_instance_hour_usd"] == float(price)
    assert instance["regions"]["us-west-2"]["price_per_instance_hour_usd"] == float(price)
    assert {instance["gpu"] for instance in document["instances"]} == {"H100-SXM5-80GB"}


def test_table_fits_80_columns_and_marks_derived_prices(cli: Cli) -> None:
    result = cli("instances", "--region", "ap-northeast-1", env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) <= 80
    [row] = [line for line in result.stdout.splitlines() if line.startswith("ml.p5.48xlarge")]
    assert "~$" in row
    # The EC2 family is not offered there.
    [row] = [line for line in result.stdout.splitlines() if line.startswith("ml.p6-b200.48xlarge")]
    assert row.split()[-2:] == ["–", "–"]


def test_every_region_of_a_type_cheapest_first(cli: Cli) -> None:
    rows = cli("instances", "--gpu", "p5.48xlarge", "--regions").stdout.splitlines()[1:]
    prices = [float(row.split("$")[1]) for row in rows if row.startswith("ml.p5.48xlarge")]
    assert len(prices) > 5
    assert prices == sorted(prices)


def test_unknown_gpu_lists_the_known_ones(cli: Cli) -> None:
    result = cli("instances", "--gpu", "H999")
    assert result.returncode == 2
    assert "H100-SXM5-80GB" in one_line(result.stderr)
