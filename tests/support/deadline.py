"""How long tests wait."""

from __future__ import annotations

DEADLINE = 180.0
"""Seconds until a test gives up waiting for a process or an event.

Long, so that it holds on a busy machine; only a test that fails waits for it.
"""
