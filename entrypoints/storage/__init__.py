"""Folders and S3: requests, conditional writes and leases."""

ENTRANCES = (
    "aws_session",
    "bucket_settings",
    "lease",
    "lease_files",
    "object_file",
    "storage",
    "store",
    "stream_upload",
)
"""Modules through which other wings enter."""
