"""What an error of S3 means."""

from __future__ import annotations

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


def is_aborted_upload(error: BaseException) -> bool:
    """Return whether S3 reports that the upload was aborted, by another process."""
    from botocore.exceptions import ClientError

    return isinstance(error, ClientError) and error_code(error) == "NoSuchUpload"
