"""Which errors of AWS and of the network are permanent: all others may succeed later."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import botocore.exceptions
import pytest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from sm_train.toolkit.aws.aws_errors import translate_aws_errors
from sm_train.toolkit.base.errors import TRANSIENT, ExitCode, UserError

PERMANENT = {
    "NoCredentialsError": {},
    "PartialCredentialsError": {"provider": "env", "cred_var": "AWS_SECRET_ACCESS_KEY"},
    "ProfileNotFound": {"profile": "ours"},
    "SSOTokenLoadError": {"profile_name": "ours", "error_msg": "expired"},
    "UnauthorizedSSOTokenError": {},
    "TokenRetrievalError": {"provider": "sso", "error_msg": "Token has expired"},
    "LoginRefreshRequired": {},
    "ParamValidationError": {"report": "Missing required parameter"},
    "NoRegionError": {},
    "InvalidRegionError": {"region_name": "us east"},
    "UnknownEndpointError": {"service_name": "s3", "region_name": "moon-1"},
}
OF_THE_MOMENT = {
    "CredentialRetrievalError": {"provider": "assume-role", "error_msg": "timed out"},
    "MetadataRetrievalError": {"error_msg": "no answer"},
    "IncompleteReadError": {"actual_bytes": 3, "expected_bytes": 9},
    "FlexibleChecksumError": {"error_msg": "crc32 differs"},
    "ResponseStreamingError": {"error": "reset"},
    "EndpointConnectionError": {"endpoint_url": "https://s3"},
    "ReadTimeoutError": {"endpoint_url": "https://s3"},
    "ConnectionClosedError": {"endpoint_url": "https://s3"},
}


def translated(error: Exception) -> UserError:
    with pytest.raises(UserError) as caught, translate_aws_errors("DescribeTrainingJob"):
        raise error
    assert "\n" not in str(caught.value)
    return caught.value


def of_botocore(name: str, fields: dict[str, Any]) -> BotoCoreError:
    error: BotoCoreError = getattr(botocore.exceptions, name)(**fields)
    return error


@pytest.mark.parametrize("name", PERMANENT)
def test_configuration_and_sign_in_are_permanent(name: str) -> None:
    error = translated(of_botocore(name, PERMANENT[name]))
    assert error.exit_code in (ExitCode.PERMISSION, ExitCode.PREFLIGHT)


@pytest.mark.parametrize("name", OF_THE_MOMENT)
def test_a_lost_network_and_a_truncated_answer_are_not(name: str) -> None:
    error = translated(of_botocore(name, OF_THE_MOMENT[name]))
    assert error.exit_code in TRANSIENT
    assert str(error).startswith("DescribeTrainingJob: ")


def test_the_answer_of_a_proxy_is_of_the_moment() -> None:
    """A hotel's network answers with its sign-in page."""
    html = "Unable to parse response (not well-formed),\ninvalid XML received: <html>Sign in"
    assert translated(ResponseParserError(html)).exit_code in TRANSIENT


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("AuthFailure", ExitCode.PERMISSION),
        ("UnauthorizedOperation", ExitCode.PERMISSION),
        ("OptInRequired", ExitCode.PERMISSION),
        ("InvalidSignatureException", ExitCode.PERMISSION),
        ("ValidationException", ExitCode.PREFLIGHT),
        ("PermanentRedirect", ExitCode.PREFLIGHT),
        ("ThrottlingException", ExitCode.CAPACITY),
        ("InternalFailure", ExitCode.UNEXPECTED),
        ("SomethingNewException", ExitCode.UNEXPECTED),
    ],
)
def test_codes_of_aws(code: str, exit_code: ExitCode) -> None:
    assert translated(rejected(code)).exit_code == exit_code


@pytest.mark.parametrize(
    ("minutes", "text"),
    [(-22, "22 min ahead of AWS's: set it"), (40, "40 min behind AWS's: set it"), (1, None)],
)
def test_a_wrong_clock_is_named_with_its_difference(minutes: int, text: str | None) -> None:
    """SageMaker refuses signatures with this code (aws/aws-sdk-js#254)."""
    message = "Signature expired: 20261130T100000Z is now earlier than 20261130T101500Z"
    now = datetime.now(UTC) + timedelta(minutes=minutes)
    error = translated(rejected("InvalidSignatureException", message, format_datetime(now, True)))
    assert str(error).endswith(message if text is None else f"; this machine's clock is {text}")
    assert error.exit_code == ExitCode.PERMISSION


def rejected(code: str, message: str = "no", date: str | None = None) -> ClientError:
    headers = {} if date is None else {"date": date}
    response: Any = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPHeaders": headers, "HTTPStatusCode": 400},
    }
    return ClientError(response, "DescribeTrainingJob")
