"""Sessions, S3, CloudWatch and errors of AWS."""

ENTRANCES = (
    "aws_errors",
    "bucket_policy",
    "cloudwatch_logs",
    "cloudwatch_metrics",
    "s3",
    "s3_components",
    "s3_download",
    "session",
)
"""Modules through which other wings enter."""
