"""Imported once by the server of forked commands: does what every command would do again.

It imports the command line's modules, checks the SDK's configuration schema, and parses botocore's
service models. None of this depends on a command, its environment or its folder. Tests of what a
command imports start new interpreters.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import boto3
import jsonschema

from tests.support.forked_commands.botocore_models import parse_models_once
from tests.support.log_lines import haystack, stream
from tests.support.run_documents import run

SERVICES = (
    *("cloudwatch", "ecr", "ec2", "events", "iam", "logs", "pricing", "s3", "sagemaker"),
    *("secretsmanager", "service-quotas", "sns", "ssm", "sts"),
)
"""The services whose models commands read."""

HEAVY = ("sm_train.toolkit.__main__", "sm_train.toolkit.demo", "sm_train.toolkit.models.sampling")
"""Modules that start something, or that import PyTorch."""


def import_command_line() -> None:
    """Import the laptop's modules, which commands import only when they need them."""
    for package in ("sm_train.cost", "sm_train.estimators", "sm_train.toolkit"):
        for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
            if not module.name.startswith(HEAVY) and not module.name.endswith("__main__"):
                import_module(module.name)


def check_schemas_once() -> None:
    """Remember which schemas are valid: the SDK checks its own 13 times in a submission."""
    from sagemaker.core.config.config_schema import SAGEMAKER_PYTHON_SDK_CONFIG_SCHEMA

    validator: Any = jsonschema.validators.validator_for(SAGEMAKER_PYTHON_SDK_CONFIG_SCHEMA)
    check: Callable[..., None] = validator.check_schema
    checked: dict[int, Any] = {}

    def check_once(schema: Any, *args: Any, **kwargs: Any) -> None:
        if checked.get(id(schema)) is not schema:
            check(schema, *args, **kwargs)
            checked[id(schema)] = schema

    validator.check_schema = staticmethod(check_once)
    check_once(SAGEMAKER_PYTHON_SDK_CONFIG_SCHEMA)


def parse_service_models() -> None:
    """Make every client once, with its paginators, so that commands find their models parsed."""
    parse_models_once()
    session = boto3.Session("none", "none", region_name="us-east-1")
    for service in SERVICES:
        client = session.client(service)  # type: ignore[call-overload]
        client.can_paginate(next(iter(client.meta.method_to_api_mapping)))
        _ = client.waiter_names


def fill_caches() -> None:
    """Do what the first command of a process would do: compile the expressions of signatures and of
    credentials, and build the models of a run file.
    """
    from sm_train.estimators.config.load import load_document
    from sm_train.toolkit.analysis.diagnose.diagnosis import diagnose
    from sm_train.toolkit.submit.run_bundle import bundle_of

    diagnose([stream(haystack("ValueError: x"))])
    bundle_of(load_document(run(), (), "run"), Path())


import_command_line()
check_schemas_once()
parse_service_models()
fill_caches()
