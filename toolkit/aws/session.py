"""Every call to AWS that a submission makes before the job itself, and its refusals in words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sm_train.toolkit.errors import ExitCode, UserError

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
_REFUSED_CODES = {"ValidationError", "ValidationException"}
_THROTTLING_CODES = {
    "503",
    "RequestLimitExceeded",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
_CAPACITY_CODES = {"CapacityError", "ResourceLimitExceeded", *_THROTTLING_CODES}
_MENDS = {
    "ExpiredToken": "sign in again",
    "ExpiredTokenException": "sign in again",
    "RequestExpired": "set this machine's clock",
    "RequestTimeTooSkewed": "set this machine's clock",
    "ResourceLimitExceeded": "ask for a higher quota, or take fewer machines",
}
"""What a person can do about a code whose own message does not say."""


def resolve_region(option: str | None, run_file: str | None, profile: str | None) -> str:
    """The region: the command line's, the run file's, the environment's or the profile's."""
    region = option or run_file or os.environ.get("AWS_REGION")
    region = region or os.environ.get("AWS_DEFAULT_REGION")
    if region is None:
        import botocore.exceptions
        import botocore.session

        try:
            region = botocore.session.Session(profile=profile).get_config_variable("region")
        except botocore.exceptions.ProfileNotFound:
            raise UserError(
                f"--profile: {profile!r} is not in the AWS configuration", ExitCode.PERMISSION
            ) from None
    if region is None:
        raise UserError(
            "region: not set; write region: us-east-1 in the run file or give --region",
            ExitCode.PERMISSION,
        )
    return region


def open_session(profile: str | None, region: str) -> Any:
    """A boto3 session that has credentials.

    Raises:
        UserError: no such profile, or no credentials anywhere (exit code 4).
    """
    import boto3
    import botocore.exceptions

    inner = _patient_session(profile)
    try:
        session = boto3.Session(botocore_session=inner, region_name=region)
        credentials = session.get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise UserError(f"AWS credentials: {error}", ExitCode.PERMISSION) from None
    if credentials is None:
        raise UserError(
            "AWS credentials: none found; run `aws configure` or `aws sso login`, "
            "or give --profile",
            ExitCode.PERMISSION,
        )
    return session


def _patient_session(profile: str | None) -> Any:
    """A session of botocore's that tries throttled calls again, ever more slowly, for about a
    minute.
    """
    import botocore.config
    import botocore.session

    session = botocore.session.Session(profile=profile)
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        retries = botocore.config.Config(retries={"mode": "adaptive", "max_attempts": 8})
        session.set_default_client_config(retries)
    return session


def client_with_unix_times(session: Any, service: str) -> Any:
    """A client whose answers have Unix seconds where botocore would put datetimes.

    Those take 20 µs each, which is half a minute for a large job's metrics. How times are read is
    a whole session's: so this client has one of its own, with the credentials of this moment.

    Raises:
        UserError: the credentials cannot be had any more.
    """
    region = session.region_name
    if isinstance(session, _RegionView):
        session = session.session
    known = session.profile_name in session.available_profiles
    inner = _patient_session(session.profile_name if known else None)
    times = inner.get_component("response_parser_factory")
    times.set_parser_defaults(timestamp_parser=unix_seconds)
    with translate_aws_errors("AWS credentials"):
        key = session.get_credentials().get_frozen_credentials()
        return inner.create_client(
            service,
            region_name=region,
            aws_access_key_id=key.access_key,
            aws_secret_access_key=key.secret_key,
            aws_session_token=key.token,
        )


def unix_seconds(time: float | str) -> float:
    """A time as AWS's protocols write it: Unix seconds, or ISO 8601 in XML."""
    return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else float(time)


@dataclass(frozen=True)
class _RegionView:
    """A session's credentials and settings, for another region."""

    session: Any
    region_name: str

    def client(self, service: str, **settings: Any) -> Any:
        return self.session.client(service, **{"region_name": self.region_name} | settings)


def for_region(session: Any, region: str) -> Any:
    """``session``, or what makes its clients for ``region``."""
    if isinstance(session, _RegionView):
        session = session.session
    return session if session.region_name == region else _RegionView(session, region)


def account_of(session: Any) -> str:
    """The account of the session's credentials.

    Raises:
        UserError: they are not valid (any more), or AWS cannot be reached (exit code 4).
    """
    with translate_aws_errors("AWS credentials"):
        account: str = session.client("sts").get_caller_identity()["Account"]
    return account


def is_without_credentials(error: Any) -> bool:
    """Whether a ClientError is about the credentials, and so would be that of any other call."""
    return error.response["Error"].get("Code") in _CREDENTIAL_CODES


def is_throttling(error: Any) -> bool:
    """Whether a ClientError says that the service is busy."""
    return error.response["Error"].get("Code") in _THROTTLING_CODES


@contextmanager
def translate_aws_errors(doing: str) -> Iterator[None]:
    """Turn what AWS or the network refuses into one line with the right exit code."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionError,
        HTTPClientError,
    )

    try:
        yield
    except ClientError as error:
        code = error.response["Error"].get("Code", "")
        message = error.response["Error"].get("Message", str(error))
        exit_code = ExitCode.UNEXPECTED
        if code in _PERMISSION_CODES:
            exit_code = ExitCode.PERMISSION
        elif code in _CAPACITY_CODES:
            exit_code = ExitCode.CAPACITY
        elif code in _REFUSED_CODES:
            exit_code = ExitCode.PREFLIGHT
        mend = f"; {_MENDS[code]}" if code in _MENDS else ""
        raise UserError(f"{doing}: AWS answers {code}: {message}{mend}", exit_code) from None
    except (ConnectionError, HTTPClientError) as error:
        raise UserError(f"{doing}: AWS cannot be reached: {error}", ExitCode.UNEXPECTED) from None
    except BotoCoreError as error:
        raise UserError(f"{doing}: {error}", ExitCode.PERMISSION) from None


def require_bucket(session: Any, bucket: str, region: str, field: str) -> None:
    """Refuse a bucket that does not exist, may not be read, or lies in another region.

    Traffic between regions is billed and slow, and SageMaker refuses it for a job's channels.
    """
    with translate_aws_errors(f"{field}: bucket {bucket}"):
        try:
            actual = bucket_region(session, bucket)
        except LookupError:
            raise UserError(
                f"{field}: bucket {bucket} does not exist; make it in {region} or name another",
                ExitCode.PERMISSION,
            ) from None
    if actual is not None and actual != region:
        raise UserError(
            f"{field}: bucket {bucket} is in {actual} and the job would run in {region}; "
            "use a bucket in the job's region, or run there",
            ExitCode.PREFLIGHT,
        )


def bucket_region(session: Any, bucket: str) -> str | None:
    """The region of a bucket; None where S3 does not say.

    Raises:
        LookupError: there is no such bucket.
        ClientError: S3 refuses to say.
    """
    from botocore.exceptions import ClientError

    try:
        answer = session.client("s3").head_bucket(Bucket=bucket)
        region: str | None = answer.get("BucketRegion") or _region_header(answer)
    except ClientError as error:
        status = error.response["ResponseMetadata"].get("HTTPStatusCode")
        region = _region_header(error.response)
        if status == 404:
            raise LookupError(bucket) from None
        # Another region's bucket is answered with a redirection; whose it is was found out then.
        if status not in (301, 400) or region in (None, session.region_name):
            raise
    return region


def _region_header(answer: Any) -> str | None:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region: str | None = headers.get("x-amz-bucket-region")
    return region


def require_shards(session: Any, uri: str, instances: int) -> None:
    """Refuse a data prefix with fewer objects than instances: the others would idle, billed."""
    bucket, prefix = split_uri(uri)
    with translate_aws_errors(f"data.uri: {uri}"):
        pages = session.client("s3").get_paginator("list_objects_v2")
        count = 0
        for page in pages.paginate(Bucket=bucket, Prefix=prefix):
            # The object of that very name would come first.
            if prefix and page.get("Contents", [{}])[0].get("Key") == prefix.rstrip("/"):
                raise UserError(
                    f"data.uri: {uri} is a single object; FastFile with ShardedByS3Key needs the "
                    "prefix above it",
                    ExitCode.PREFLIGHT,
                )
            count += page.get("KeyCount", 0)
            if count >= instances:
                return
    raise UserError(
        f"data.uri: {uri} holds {count} objects for {instances} instances; ShardedByS3Key would "
        f"leave {instances - count} of them idle; pack at least {instances} shards",
        ExitCode.PREFLIGHT,
    )


def require_index(session: Any, shards: str, uri: str | None) -> None:
    """Refuse a run whose index is not there: the job would fail when it has been paid for."""
    if uri is None:
        return
    from botocore.exceptions import ClientError

    bucket, key = split_uri(uri)
    with translate_aws_errors(f"data.index: {uri}"):
        try:
            session.client("s3").head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if error.response["Error"].get("Code") not in ("404", "NoSuchKey"):
                raise
            raise UserError(
                f"data.index: {uri} is not there; run `sm-train index {shards}`, or write "
                "index: false, and every start reads the headers of all shards",
                ExitCode.PREFLIGHT,
            ) from None


def split_uri(uri: str) -> tuple[str, str]:
    """``s3://bucket/key`` as bucket and key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
