"""Helpers of the tests of prices, which other tests use as well."""

from __future__ import annotations

import json
from typing import Any


def product(usage: str, price: str = "63.296", **attributes: str) -> dict[str, Any]:
    """One item of GetProducts, in the shape of the AWS Billing user guide."""
    return {
        "product": {"sku": "SKU1", "attributes": {"usagetype": usage, **attributes}},
        "publicationDate": "2026-09-24T23:59:00Z",
        "terms": {
            "OnDemand": {
                "SKU1.TERM": {
                    "priceDimensions": {
                        "SKU1.TERM.DIM": {"unit": "Hrs", "pricePerUnit": {"USD": price}}
                    }
                }
            }
        },
    }


def get_products(*items: dict[str, Any]) -> dict[str, Any]:
    return {"FormatVersion": "aws_v1", "PriceList": [json.dumps(item) for item in items]}
