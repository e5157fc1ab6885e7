"""Asks for the values of a run file, with those of the user's AWS account to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click
from sm_train.cost.instances import instance_type
from sm_train.estimators.regions import DEFAULT_REGION
from sm_train.toolkit.aws.session import profile_region
from sm_train.toolkit.base.errors import UserError
from sm_train.toolkit.base.settings import from_config
from sm_train.toolkit.init.account import Account, open_account
from sm_train.toolkit.init.template import RDMA_RESOURCE, Values, require_valid_value
from sm_train.toolkit.planning.price_table import price_table
from sm_train.toolkit.terminal.confirmation import interruptible_prompts
from sm_train.toolkit.terminal.console import stderr_console, write_line
from sm_train.toolkit.terminal.formatting import format_usd

T = TypeVar("T")

_MOST_TYPES = 10


@interruptible_prompts()
def ask_values(
    given: Values, profile: str | None, *, default_type: str, on_kubernetes: bool = False
) -> Values:
    """Ask for each value that ``given`` lacks; an empty answer keeps the template's placeholder.

    ``default_type`` is the template's instance type. A run on Kubernetes needs no role, and its
    nodes are given.
    """
    write_line("Enter takes the value in brackets; Ctrl-C ends without writing a file.\n", err=True)
    values = given
    if values.name is None:
        values = replace(values, name=_ask("name", "Name of the run", "my-model"))
    if values.region is None:
        values = replace(values, region=_ask("region", "AWS region", _default_region(profile)))
    account = _account(profile, values.region or DEFAULT_REGION)
    if values.role is None and not on_kubernetes:
        roles = _listed("roles", account.roles if account else None)
        values = replace(values, role=_choose("role", "IAM role of the jobs", roles))
    if values.bucket is None:
        buckets = _listed("buckets", account.buckets if account else None)
        label = "Bucket for checkpoints and results"
        values = replace(values, bucket=_choose("bucket", label, buckets))
    if values.data is None:
        default = f"s3://{values.bucket}/shards/" if values.bucket else ""
        values = replace(values, data=_ask("data", "Training data (S3 prefix)", default))
    if on_kubernetes:
        return _ask_of_cluster(values)
    if values.instance_type is None:
        quotas = _listed("quotas", account.usable_types if account else None)
        values = replace(values, instance_type=_choose_type(quotas, values.region, default_type))
    return values


def _ask_of_cluster(values: Values) -> Values:
    if values.image is None:
        label = "Container image with PyTorch (empty: fill in later)"
        values = replace(values, image=_ask("image", label, ""))
    if values.rdma_resource is None:
        label = "RDMA resource of the nodes (`kubectl describe node`)"
        values = replace(values, rdma_resource=_ask("rdma_resource", label, RDMA_RESOURCE))
    return values


def _default_region(profile: str | None) -> str:
    setting = from_config("region")
    return setting.value if setting else profile_region(profile) or DEFAULT_REGION


def _account(profile: str | None, region: str) -> Account | None:
    """Return the account of the credentials; None, with the reason, without usable ones."""
    try:
        with stderr_console().status("reading the AWS account"):
            account = open_account(profile, region)
    except UserError as error:
        write_line(f"No AWS account to read values from ({error})", err=True)
        return None
    write_line(f"AWS account {account.number}", err=True)
    return account


def _listed(what: str, read: Callable[[], T] | None) -> T | None:
    """Return what the account has; None, with the reason, if it cannot be read."""
    if read is None:
        return None
    try:
        with stderr_console().status(f"reading the account's {what}"):
            return read()
    except UserError as error:
        write_line(f"Cannot list {what} ({error})", err=True)
        return None


def _ask(option: str, label: str, default: str) -> str | None:
    """Ask until the answer is valid; None for an empty one."""

    def parse(answer: str) -> str:
        if answer:
            try:
                require_valid_value(option, answer)
            except UserError as error:
                raise click.UsageError(str(error).partition(": ")[2]) from None
        return answer

    prompt: str = click.prompt(
        label, default=default, show_default=bool(default), value_proc=parse, err=True
    )
    return prompt or None


def _choose(option: str, label: str, choices: Sequence[str] | None) -> str | None:
    """Ask for one of ``choices`` by number, or for another value."""
    if not choices:
        return _ask(option, f"{label} (empty: fill in later)", "")
    for number, choice in enumerate(choices, 1):
        write_line(f"  {number:>2}  {choice}", err=True)
    return _ask_number(option, f"{label}: number or another value", choices)


def _ask_number(option: str, label: str, choices: Sequence[str]) -> str:
    def parse(answer: str) -> str:
        if answer.isdigit():
            if not 1 <= int(answer) <= len(choices):
                raise click.UsageError(f"{answer} is not from 1 to {len(choices)}")
            return choices[int(answer) - 1]
        try:
            require_valid_value(option, answer)
        except UserError as error:
            raise click.UsageError(str(error).partition(": ")[2]) from None
        return answer

    chosen: str = click.prompt(label, default="1", value_proc=parse, err=True)
    return chosen


def _choose_type(
    quotas: dict[str, int] | None, region: str | None, default_type: str
) -> str | None:
    """Ask for an instance type among those that the quotas allow."""
    if not quotas:
        if quotas is not None:
            write_line("The quotas of this region allow no GPU instance for training", err=True)
        return _ask("instance_type", "Instance type", default_type)
    names = sorted(quotas, key=_gpu_memory, reverse=True)[:_MOST_TYPES]
    prices = price_table()
    for number, name in enumerate(names, 1):
        instance: Any = instance_type(name)
        price = prices.price(name, region or DEFAULT_REGION).usd_per_instance_hour
        usd = "price unknown" if price is None else f"{format_usd(float(price))} an hour"
        write_line(
            f"  {number:>2}  {name:<17} {instance.accelerators} × {instance.accelerator}, {usd}, "
            f"quota {quotas[name]}",
            err=True,
        )
    return _ask_number("instance_type", "Instance type: number or another type", names)


def _gpu_memory(name: str) -> float:
    instance = instance_type(name)
    return instance.accelerators * (instance.accelerator_memory_gib or 0)
