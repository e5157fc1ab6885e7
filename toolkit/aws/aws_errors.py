"""Translates AWS and network errors into one-line messages with the right exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from sm_train.toolkit.base.errors import ExitCode, UserError

if TYPE_CHECKING:
    from botocore.exceptions import BotoCoreError, ClientError

_CREDENTIAL_CODES = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidSignatureException",
    "InvalidToken",
    "MissingAuthenticationToken",
    "RequestExpired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "UnrecognizedClientException",
}
_PERMISSION_CODES = {
    "403",
    "AccessDenied",
    "AccessDeniedException",
    "AccountProblem",
    "AllAccessDisabled",
    "AuthorizationError",
    "NotAuthorized",
    "OptInRequired",
    "SubscriptionRequiredException",
    "UnauthorizedOperation",
    *_CREDENTIAL_CODES,
}
_SERVER_ERROR = 500
_INVALID_REQUEST_CODES = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidAction",
    "InvalidArgument",
    "InvalidBucketName",
    "InvalidParameter",
    "InvalidParameterException",
    "InvalidParameterValue",
    "KMS.DisabledException",
    "KMS.NotFoundException",
    "KMSAccessDeniedException",
    "MalformedPolicyDocument",
    "MethodNotAllowed",
    "NoSuchBucket",
    "NotImplemented",
    "PermanentRedirect",
    "UnknownOperationException",
    "ValidationError",
    "ValidationException",
}
"""With these and those above, the same call fails again: other codes may be of the moment, and are
transient."""

_CLOCK_CODES = {
    *("AuthFailure", "InvalidSignatureException", "RequestExpired", "RequestTimeTooSkewed"),
    "SignatureDoesNotMatch",
}
_MOST_CLOCK_SECONDS = 240.0
"""AWS refuses signatures that are older than five minutes, or fifteen."""

_PERMANENT = (
    *("ConfigNotFound", "ConfigParseError", "InvalidConfigError", "InfiniteLoopConfigError"),
    *("LoginError", "MissingDependencyException", "NoAuthTokenError", "NoCredentialsError"),
    *("PartialCredentialsError", "ProfileNotFound", "RefreshWithMFAUnsupportedError", "SSOError"),
    *("TokenRetrievalError", "UnknownCredentialError", "UnknownTokenProviderError"),
)
"""Errors of botocore that come of this machine's configuration or sign-in."""

_INVALID = (
    *("BaseEndpointResolverError", "EndpointProviderError", "InvalidRegionError"),
    *("MissingParametersError", "ParamValidationError", "UnknownServiceError", "ValidationError"),
)
"""Errors of botocore that come of the request."""

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
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, S3UploadFailedError, ResponseParserError) as error:
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
        fix = f"; {_FIXES[code]}" if code in _FIXES else _clock_fix(error, code)
        if may_succeed_later(error):
            fix = "; run the same command again"
        address = str(error.response["Error"].get("Address", ""))
        subject = operation if address in operation else f"{address}: {operation}"
        return UserError(f"{subject}: AWS returned {code}: {message}{fix}", exit_code)
    prefix, text = f"{operation}: " if operation else "", " ".join(str(error).split())
    if isinstance(error, ConnectionError | HTTPClientError):
        return UserError(f"{prefix}cannot reach AWS: {error}", ExitCode.UNEXPECTED)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if not kinds.isdisjoint(_PERMANENT):
        return UserError(f"{prefix}{text}", ExitCode.PERMISSION)
    if not kinds.isdisjoint(_INVALID):
        return UserError(f"{prefix}{text}", ExitCode.PREFLIGHT)
    # A truncated answer, or one of a proxy: what AWS would have said is unknown.
    return UserError(f"{prefix}{text}; run the same command again", ExitCode.UNEXPECTED)


def _clock_fix(error: ClientError, code: str) -> str:
    """Return by how much this machine's clock is wrong, if that explains a rejected signature."""
    if code not in _CLOCK_CODES:
        return ""
    date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if date is not None:
        ahead = (datetime.now(UTC) - parsedate_to_datetime(date)).total_seconds()
        if abs(ahead) > _MOST_CLOCK_SECONDS:
            side = "ahead of" if ahead > 0 else "behind"
            return f"; this machine's clock is {abs(ahead) / 60:.0f} min {side} AWS's: set it"
    return "; set this machine's clock" if code.startswith("Request") else ""
