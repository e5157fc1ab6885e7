"""Translates AWS and network errors into one-line messages with the right exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sm_train.toolkit.errors import ExitCode, UserError

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

_CREDENTIAL_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "RequestExpired",
    "RequestTimeTooSkewed",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_PERMISSION_CODES = {
    "403",
    "AccessDenied",
    "AccessDeniedException",
    "AuthorizationError",
    *_CREDENTIAL_CODES,
}
_SERVER_ERROR = 500
_INVALID_REQUEST_CODES = {"ValidationError", "ValidationException"}
_THROTTLING_CODES = {
    "503",
    "RequestLimitExceeded",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
_CAPACITY_CODES = {"CapacityError", "ResourceLimitExceeded", *_THROTTLING_CODES}
_FIXES = {
    "ExpiredToken": "sign in again",
    "ExpiredTokenException": "sign in again",
    "RequestExpired": "set this machine's clock",
    "RequestTimeTooSkewed": "set this machine's clock",
    "ResourceLimitExceeded": "request a higher quota, or use fewer instances",
}
"""Fixes for error codes whose own message names none."""


def is_credential_error(error: ClientError | BotoCoreError) -> bool:
    """Return whether the credentials are invalid, so that every other call would fail too."""
    return _error_code(error) in _CREDENTIAL_CODES


def is_throttling(error: ClientError | BotoCoreError) -> bool:
    """Return whether the service rejected the call because it is busy."""
    return _error_code(error) in _THROTTLING_CODES


def _error_code(error: ClientError | BotoCoreError) -> str | None:
    """Return the service's error code; None if there was no response."""
    response = getattr(error, "response", None) or {}
    code: str | None = response.get("Error", {}).get("Code")
    return code


def may_succeed_later(error: ClientError | BotoCoreError) -> bool:
    """Return whether the service failed or was busy, so that the same call may succeed later."""
    response = getattr(error, "response", None) or {}
    status: int = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status >= _SERVER_ERROR or is_throttling(error)


def no_credentials() -> UserError:
    """Return the message for a machine on which no credentials were found."""
    return UserError(
        "AWS credentials: none found; run `aws configure` or `aws sso login`, or give --profile",
        ExitCode.PERMISSION,
    )


@contextmanager
def translate_aws_errors(operation: str) -> Iterator[None]:
    """Raise AWS and network errors as a :class:`UserError` that begins with ``operation``."""
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, S3UploadFailedError) as error:
        raise as_user_error(error, operation) from None


def as_user_error(error: Exception, operation: str | None = None) -> UserError:
    """Return an AWS or network error as a line that begins with ``operation``.

    The default is the operation that AWS rejected.
    """
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import (
        ClientError,
        ConnectionError,
        HTTPClientError,
        NoCredentialsError,
    )

    if isinstance(error, NoCredentialsError):
        return no_credentials()
    if isinstance(error, S3UploadFailedError) and isinstance(error.__context__, ClientError):
        error = error.__context__  # boto3 puts S3's answer into a text
    if isinstance(error, ClientError):
        operation = operation or error.operation_name
        code = error.response["Error"].get("Code", "")
        message = error.response["Error"].get("Message", str(error))
        exit_code = ExitCode.UNEXPECTED
        if code in _PERMISSION_CODES:
            exit_code = ExitCode.PERMISSION
        elif code in _CAPACITY_CODES:
            exit_code = ExitCode.CAPACITY
        elif code in _INVALID_REQUEST_CODES:
            exit_code = ExitCode.PREFLIGHT
        fix = f"; {_FIXES[code]}" if code in _FIXES else ""
        if may_succeed_later(error):
            fix = "; run the same command again"
        address = str(error.response["Error"].get("Address", ""))
        subject = operation if address in operation else f"{address}: {operation}"
        return UserError(f"{subject}: AWS returned {code}: {message}{fix}", exit_code)
    if isinstance(error, ConnectionError | HTTPClientError):
        prefix = f"{operation}: " if operation else ""
        return UserError(f"{prefix}cannot reach AWS: {error}", ExitCode.UNEXPECTED)
    prefix = f"{operation}: " if operation else ""
    return UserError(f"{prefix}{error}", ExitCode.PERMISSION)
