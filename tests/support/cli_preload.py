"""Imported once by the server of forked commands: does what every command would do again.

It imports the command line's modules, checks the SDK's configuration schema, and parses botocore's
service models. None of this depends on a command, its environment or its folder. Tests of what a
command imports start new interpreters.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import jsonschema
from botocore.loaders import JSONFileLoader, Loader

SERVICES = ("cloudwatch", "events", "iam", "logs", "s3", "sagemaker", "sns", "sts")
"""The services whose models commands read."""

HEAVY = ("sm_train.toolkit.__main__", "sm_train.toolkit.demo", "sm_train.toolkit.sampling")
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


def parse_service_models_once() -> None:
    """Keep the parsed JSON files of botocore, which each session would parse for itself."""
    load = JSONFileLoader.load_file
    loader = JSONFileLoader()
    parsed = cache(lambda path: load(loader, path))

    def load_once(_: JSONFileLoader, path: str) -> Any:
        return parsed(path)

    JSONFileLoader.load_file = load_once  # type: ignore[method-assign]
    models = Loader()
    for service in SERVICES:
        models.load_service_model(service, "service-2")


import_command_line()
check_schemas_once()
parse_service_models_once()
