"""Sessions of boto3: region, credentials and retries; addresses of pages of the AWS console."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sm_train.cost.prices import REFERENCE_REGION
from sm_train.entrypoints.storage.aws_session import prepare_session
from sm_train.estimators.regions import region_problem
from sm_train.toolkit.aws.aws_errors import no_credentials, translate_aws_errors
from sm_train.toolkit.base.errors import ExitCode, UserError
from sm_train.toolkit.base.extras import is_installed, require_extra
from sm_train.toolkit.base.settings import from_config, from_environment

if TYPE_CHECKING:
    import boto3
    import botocore.session
    from botocore.credentials import Credentials
    from types_boto3_cloudwatch import CloudWatchClient


def training_job_url(region: str, job: str) -> str:
    """Return the page of a training job."""
    return f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job}"


def resolve_region(option: str | None, run_file: str | None, profile: str | None) -> str:
    """Return the region of the command line, `SM_TRAIN_REGION`, the run file, the environment, the
    configuration file or the AWS profile: the first that names one.

    Raises:
        UserError: none of them names one, it is not a region, or there is no such profile.
    """
    if option is not None:
        require_region("--region", option)
        return option
    if (setting := from_environment("region")) is not None:
        return setting.value
    if run_file is not None:
        return run_file
    if (setting := from_config("region")) is not None:
        require_region(setting.origin, setting.value)
        return setting.value
    region = profile_region(profile)
    if region is None:
        raise UserError(
            "region: not set; give --region us-east-1, or set a default with "
            "`sm-train config set region us-east-1`"
        )
    return region


def price_region(option: str | None) -> str:
    """Return the region of the command line or the user's defaults, else us-east-1; read no AWS
    configuration, so that prices are shown quickly.

    Raises:
        UserError: it is not a region.
    """
    setting = from_environment("region") or from_config("region")
    region = option or (setting.value if setting else REFERENCE_REGION)
    require_region(setting.origin if setting and not option else "--region", region)
    return region


def profile_region(profile: str | None) -> str | None:
    """Return the region that AWS's configuration has for ``profile``.

    Raises:
        UserError: there is no such profile.
    """
    if not is_installed("botocore"):
        return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    import botocore.exceptions
    import botocore.session

    try:
        region: str | None = botocore.session.Session(profile=profile).get_config_variable("region")
    except botocore.exceptions.ProfileNotFound:
        raise _unknown_profile(profile) from None
    return region


def _unknown_profile(profile: str | None) -> UserError:
    """Return the error of a profile of an option, the environment or the configuration file."""
    name = profile or os.environ.get("AWS_PROFILE")
    return UserError(
        f"profile: {name!r} is not in the AWS configuration; `aws configure list-profiles` lists "
        "profiles, `sm-train config` shows where this one comes from",
        ExitCode.PERMISSION,
    )


def require_region(source: str, region: str) -> None:
    """Refuse a mistyped region.

    Raises:
        UserError: ``region``, from ``source``, is not one of AWS's.
    """
    problem = region_problem(region)
    if problem:
        raise UserError(f"{source}: {region!r} {problem}")


_CREDENTIAL_VARIABLES = {
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ROLE_ARN"),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    "BOTO_CONFIG",
}
_CREDENTIAL_FILES = ("~/.aws/config", "~/.aws/credentials", "~/.boto", "/etc/boto.cfg")
"""Where botocore 1.43 looks for credentials, other than an instance's own role
(botocore/credentials.py)."""


def open_session(profile: str | None, region: str) -> boto3.Session:
    """Return a boto3 session with credentials, which sends each bucket's owner and KMS key.

    Raises:
        UserError: there is no such profile, or no credentials were found (exit code 4), or boto3
            is not installed.
    """
    require_extra("aws", "boto3", purpose="every request to AWS")
    import boto3
    import botocore.exceptions

    inner = _retrying_session(profile)
    try:
        session = boto3.Session(botocore_session=inner, region_name=region)
        credentials = session.get_credentials()
    except botocore.exceptions.ProfileNotFound:
        raise _unknown_profile(profile) from None
    except botocore.exceptions.BotoCoreError as error:
        raise UserError(f"AWS credentials: {error}", ExitCode.PERMISSION) from None
    if credentials is None:
        raise no_credentials()
    prepare_session(session)
    return session


def open_session_if_possible(profile: str | None, region: str) -> boto3.Session | None:
    """Return a session for an optional look at the account, whose calls fail within seconds.

    Return None without credentials in the environment or in a profile. An instance's own role is
    left out: asking for it takes seconds on a machine that has none.
    """
    if not is_installed("boto3") or not (profile or _has_settings()):
        return None
    import boto3
    import botocore.config
    import botocore.exceptions
    import botocore.session

    inner = botocore.session.Session(profile=profile)
    inner.set_default_client_config(
        botocore.config.Config(
            connect_timeout=3, read_timeout=10, retries={"total_max_attempts": 2}
        )
    )
    try:
        inner.get_component("credential_provider").remove("iam-role")
        session = boto3.Session(botocore_session=inner, region_name=region)
        if session.get_credentials() is None:
            return None
    except botocore.exceptions.BotoCoreError:
        return None
    prepare_session(session)
    return session


def _has_settings() -> bool:
    """Return whether botocore might find credentials in the environment or in a file.

    Importing it, only to learn that there are none, takes a tenth of a second.
    """
    return not _CREDENTIAL_VARIABLES.isdisjoint(os.environ) or any(
        Path(name).expanduser().exists() for name in _CREDENTIAL_FILES
    )


def session_in_region(session: boto3.Session, region: str) -> boto3.Session:
    """Return ``session``, or one with its credentials whose default region is ``region``.

    A single call to another region takes ``session.client(service, region_name=...)`` instead.
    """
    if session.region_name == region:
        return session
    import boto3
    from botocore.credentials import CredentialProvider, CredentialResolver

    class SharedCredentials(CredentialProvider):
        """Provides the credentials of ``session``, so that they are resolved only once."""

        METHOD = "shared"

        def load(self) -> Credentials | None:
            return session.get_credentials()

    inner = _retrying_session(_profile_of(session))
    resolver = CredentialResolver([SharedCredentials()])
    inner.register_component("credential_provider", resolver)
    regional = boto3.Session(botocore_session=inner, region_name=region)
    prepare_session(regional)
    return regional


def _profile_of(session: boto3.Session) -> str | None:
    """Return the session's profile; None for the default one where no such profile exists."""
    return session.profile_name if session.profile_name in session.available_profiles else None


def _retrying_session(profile: str | None) -> botocore.session.Session:
    """Return a botocore session that retries throttled calls with backoff for about a minute."""
    import botocore.config
    import botocore.session

    session = botocore.session.Session(profile=profile)
    if "AWS_MAX_ATTEMPTS" not in os.environ:
        retries = botocore.config.Config(retries={"mode": "adaptive", "max_attempts": 8})
        session.set_default_client_config(retries)
    return session


def cloudwatch_with_unix_times(session: boto3.Session, region: str) -> CloudWatchClient:
    """Return a CloudWatch client whose responses hold Unix seconds in place of datetimes.

    botocore takes 20 µs for each datetime: half a minute for the metrics of a large job. The
    timestamp parser is a component of the whole botocore session, so this client gets a session
    of its own with the present credentials.

    Raises:
        UserError: the credentials are no longer valid.
    """
    inner = _retrying_session(_profile_of(session))
    times = inner.get_component("response_parser_factory")
    times.set_parser_defaults(timestamp_parser=unix_seconds)
    with translate_aws_errors("AWS credentials"):
        credentials = session.get_credentials()
        assert credentials is not None  # open_session requires them
        key = credentials.get_frozen_credentials()
        client = inner.create_client(
            "cloudwatch",
            region_name=region,
            aws_access_key_id=key.access_key,
            aws_secret_access_key=key.secret_key,
            aws_session_token=key.token,
        )
    return cast("CloudWatchClient", client)


def unix_seconds(time: float | str) -> float:
    """Parse a timestamp of AWS's protocols: Unix seconds, or ISO 8601 in XML."""
    return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else float(time)


def account_of(session: boto3.Session) -> str:
    """Return the account of the session's credentials.

    Raises:
        UserError: the credentials are not valid, or AWS cannot be reached (exit code 4).
    """
    with translate_aws_errors("AWS credentials"):
        return session.client("sts").get_caller_identity()["Account"]
