"""Pages of the AWS console."""

from __future__ import annotations


def training_job_url(region: str, job: str) -> str:
    """Return the page of a training job."""
    return f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job}"
