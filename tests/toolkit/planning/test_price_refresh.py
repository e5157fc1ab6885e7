"""Prices from AWS: fetched once over HTTP, cached with their date, used offline afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Aws, Cli
from tests.cost.prices_support import get_products, product
from tests.support.background_server import serve_in_background
from tests.support.job_lifecycle import FakeSageMaker
from tests.support.run_files import write_run

PLAN = ["cost", "--instance", "ml.p5.48xlarge", "--instances", "1", "--its", "1", "--json"]
PLAN += ["--steps", "3600", "--region", "eu-north-1"]


class PriceList(ThreadingHTTPServer):
    """GetProducts of the Price List API, in pages of one item, as in its service model."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.items = items
        self.requests: list[dict[str, Any]] = []
        self.refusal: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_PRICING": f"http://127.0.0.1:{self.server_port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }


class _Handler(BaseHTTPRequestHandler):
    server: PriceList

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        status, answer = 200, self._page(body)
        if self.server.refusal:
            status, answer = 400, {"__type": self.server.refusal, "message": "no"}
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _page(self, body: dict[str, Any]) -> dict[str, Any]:
        [region] = [
            filter_["Value"] for filter_ in body["Filters"] if filter_["Field"] == "regionCode"
        ]
        items = [
            item
            for item in self.server.items
            if item["product"]["attributes"].get("regionCode") == region
        ]
        start = int(body.get("NextToken") or 0)
        page = get_products(*items[start : start + 1])
        if start + 1 < len(items):
            page["NextToken"] = str(start + 1)
        return page

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def price_list() -> Iterator[PriceList]:
    region = {"regionCode": "eu-north-1"}
    server = PriceList(
        [
            product("EUN1-Host:ml.p5.48xlarge", "1", **region),
            product("EUN1-Train:ml.p5.48xlarge", "71.25", **region),
            product("EUN1-TrSpt:ml.p5.48xlarge", "30", **region),
        ]
    )
    with serve_in_background(server):
        yield server


def test_prices_are_fetched_once_and_used_offline_afterwards(
    cli: Cli, price_list: PriceList
) -> None:
    before = json.loads(cli(*PLAN).stdout)
    assert "derived: the price in us-east-1 × 1.07" in before["stages"][0]["price_source"]
    fetched = cli(
        "cost",
        "--refresh",
        "--region",
        "eu-north-1",
        network="loopback",
        env=price_list.environment,
    )
    assert fetched.returncode == 0, fetched.stderr
    assert len(price_list.requests) == 3
    after = json.loads(cli(*PLAN).stdout)
    assert after["stages"][0]["price_per_instance_hour_usd"] == 71.25
    assert after["stages"][0]["price_status"] == "verified"
    assert after["warnings"] == []
    # Prices of other regions stay; types that the list lacks are not offered in the region.
    other_region = json.loads(cli(*PLAN[:-1], "us-east-1").stdout)
    assert other_region["stages"][0]["price_per_instance_hour_usd"] == 63.296
    missing = cli(*PLAN[:2], "ml.p4de.24xlarge", *PLAN[3:])
    [stage] = json.loads(missing.stdout)["stages"]
    assert stage["price_per_instance_hour_usd"] is None
    assert "not offered" in stage["price_source"]


def test_refused_request_leaves_the_cache_unchanged(
    cli: Cli, price_list: PriceList, tmp_path: Path
) -> None:
    options = {"network": "loopback", "env": price_list.environment}
    refresh = ["cost", "--refresh", "--region", "eu-north-1"]
    assert cli(*refresh, **options).returncode == 0
    cache = tmp_path / ".cache" / "sm-train" / "prices.json"
    content = cache.read_bytes()
    price_list.refusal = "AccessDeniedException"
    refused = cli(*refresh, **options)
    assert refused.returncode == 4
    [line] = refused.stderr.splitlines()
    assert "GetProducts: AWS returned AccessDeniedException" in line
    assert cache.read_bytes() == content
    price_list.refusal = None
    unknown = cli("cost", "--refresh", "--region", "xx-nowhere-1", **options)
    assert unknown.returncode == 2
    assert "'xx-nowhere-1' is not an AWS region" in unknown.stderr


def test_damaged_cache_is_named_with_a_fix(cli: Cli, tmp_path: Path) -> None:
    cache = tmp_path / ".cache" / "sm-train" / "prices.json"
    cache.parent.mkdir(parents=True)
    for content in ("", "{}", '{"version": 2}', '{"version": 1, "rows": [{}], "listed": {}}'):
        cache.write_text(content)
        result = cli(*PLAN)
        assert result.returncode == 2
        [line] = result.stderr.splitlines()
        assert f"{cache}: damaged price cache" in line
        assert "--refresh" in line


@pytest.mark.integration
def test_prices_of_a_submitted_run_are_those_of_its_home(
    cli: Cli, aws: Aws, price_list: PriceList, tmp_path: Path
) -> None:
    """It was submitted to another region than its run file names."""
    FakeSageMaker(aws)
    shards = {f"shards/{number}.tar": b"x" for number in range(4)}
    aws.make_bucket("ai-bucket", "us-west-2", **shards, **{"index.parquet": b"x"})
    run = write_run(tmp_path, region="us-east-1")
    options = {"network": "loopback", "env": aws.environment | price_list.environment}
    started = cli("--region", "us-west-2", "submit", run, "--yes", **options)
    assert started.returncode == 0, started.stderr
    options["env"]["AWS_DEFAULT_REGION"] = "us-west-2"
    cli("cost", "demo", "--refresh", **options)
    assert {filter_["Value"] for body in price_list.requests for filter_ in body["Filters"]} >= {
        "us-west-2"
    }
