"""The timeout of tests for processes, threads and events."""

from __future__ import annotations

DEADLINE = 300.0
"""Seconds that a test waits for a process, thread or event before it fails.

Long enough for a loaded machine; only a failing test waits that long.
"""
