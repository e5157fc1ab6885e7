"""Pages of the AWS console."""

from __future__ import annotations


def training_job_url(region: str, job: str) -> str:
    """Return the page of a training job."""
    return f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job}"


def open_in_browser(url: str) -> None:
    """Open ``url`` in the user's browser; print it, too, for machines without one."""
    import webbrowser

    from sm_train.toolkit.terminal.console import note

    if not webbrowser.open(url):
        note(f"no browser to open; the page is {url}")
