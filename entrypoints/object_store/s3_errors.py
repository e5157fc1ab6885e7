"""What an error of S3 means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


def error_code(error: ClientError) -> str:
    """Return the code that S3 answered with; that of a HEAD request is a status such as 404."""
    return error.response["Error"].get("Code", "")


def is_missing(error: ClientError) -> bool:
    """Return whether S3 reports that the object does not exist."""
    return error_code(error) in ("404", "NoSuchKey")


def is_condition_failed(error: ClientError) -> bool:
    """Return whether an object has changed since the ETag of the request, or exists by now.

    409 ConditionalRequestConflict: a concurrent put of the same key won.
    """
    codes = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")
    return error_code(error) in codes


def is_busy(error: ClientError) -> bool:
    """Return whether S3 failed or throttles, so that the same request may succeed later."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status >= 500 or error_code(error) in ("SlowDown", "RequestTimeout", "503")


def is_aborted_upload(error: BaseException) -> bool:
    """Return whether S3 reports that the upload was aborted, by another process."""
    from botocore.exceptions import ClientError

    return isinstance(error, ClientError) and error_code(error) == "NoSuchUpload"


@contextmanager
def s3_errors_as_os_errors(address: str) -> Iterator[None]:
    """Raise errors of S3 and of the transfer as those of the file system, which name ``address``.

    Raises:
        FileNotFoundError: no such object.
        PermissionError: S3 denies access.
        OSError: any other error.
    """
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except ClientError as error:
        if is_missing(error):
            raise FileNotFoundError(2, "no such object", address) from None
        if error_code(error) in ("403", "AccessDenied"):
            message = error.response["Error"].get("Message", "")
            raise PermissionError(13, f"S3 answers AccessDenied: {message}", address) from None
        again = "; run the same command again" if is_busy(error) else ""
        raise OSError(5, f"S3 answers {error_code(error)}{again}", address) from None
    except (BotoCoreError, HTTPClientError) as error:
        raise OSError(5, f"{error}; run the same command again", address) from None
