"""Reads secrets by name; no message and no exception contains a value."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from botocore.config import Config

_TIMEOUT = 10.0
_SSM_PREFIX = "ssm:"


class SecretError(Exception):
    """A secret cannot be read; a retry cannot change it if ``final``."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def read_secret(name: str) -> str:
    """Return a Secrets Manager secret, or the SSM parameter of ``ssm:NAME``.

    Raises:
        SecretError: it cannot be read; the message contains only its name.
    """
    region = name.split(":")[3] if name.startswith("arn:") else None
    try:
        import boto3

        if name.startswith(_SSM_PREFIX):
            ssm = boto3.client("ssm", config=client_config())
            parameter = name.removeprefix(_SSM_PREFIX)
            text = ssm.get_parameter(Name=parameter, WithDecryption=True)["Parameter"]["Value"]
        else:
            manager = boto3.client("secretsmanager", region_name=region, config=client_config())
            text = manager.get_secret_value(SecretId=name)["SecretString"]
    except Exception as error:
        raise SecretError(f"{name}: {aws_reason(error)}", final=is_final(error)) from None
    return text.strip()


def read_key(name: str) -> str:
    """Return the API key in a secret: its text or, as the console creates them, the only value of
    a JSON object. An object with several values is returned as it is.

    Raises:
        SecretError: it cannot be read, or is empty.
    """
    text = read_secret(name)
    if text.startswith("{"):
        try:
            values = list(json.loads(text).values())
        except ValueError:
            values = []
        if len(values) == 1 and isinstance(values[0], str):
            text = values[0].strip()
    if not text:
        raise SecretError(f"{name}: is empty", final=True)
    return text


def redact(text: str, secret: str) -> str:
    """Return ``text`` without the secret and, if it is a JSON object, without its values."""
    parts = [secret]
    with contextlib.suppress(ValueError, AttributeError):
        parts += [value for value in json.loads(secret).values() if isinstance(value, str)]
    for part in sorted(filter(None, parts), key=len, reverse=True):
        text = text.replace(part, "***")
    return text


def client_config() -> Config:
    """Return the settings of one attempt: the caller retries."""
    from botocore.config import Config

    return Config(
        connect_timeout=_TIMEOUT, read_timeout=_TIMEOUT, retries={"total_max_attempts": 1}
    )


def aws_reason(error: Exception) -> str:
    """Return AWS's error code or the exception's name: its text may contain more than that."""
    response = getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return str(code or type(error).__name__)


def is_final(error: Exception) -> bool:
    """Return whether AWS rejected the request, which a retry would not change."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return isinstance(error, ImportError)
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
    throttled = "Throttl" in aws_reason(error) or "TooMany" in aws_reason(error)
    return 400 <= status < 500 and not throttled
