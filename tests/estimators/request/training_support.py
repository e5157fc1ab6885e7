"""Helpers of the tests of training, which other tests use as well."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sm_train.estimators.bundle.bundle import Bundle, build_bundle
from sm_train.estimators.config.schema import RunConfig
from sm_train.estimators.request.launch_plan import framework_version, launch_plans
from sm_train.estimators.request.training_request import (
    training_requests,
)

from tests.support.run_documents import ECR

NOW = datetime(2026, 11, 20, 12, 0, 0)


def requests(config: RunConfig, bundle: Bundle | None = None) -> list[dict[str, Any]]:
    bundle = bundle or build_bundle(config, framework_version(config))
    image = config.cluster.image or ECR
    return training_requests(
        config, launch_plans(config, config.stages, image), bundle, region="us-east-1", now=NOW
    )
