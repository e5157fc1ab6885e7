"""The error of a manifest that cannot be written."""

from __future__ import annotations


class ManifestError(ValueError):
    """The run file does not fit the target; the message is one line: key, value and fix."""
