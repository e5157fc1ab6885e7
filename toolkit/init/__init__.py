"""Writes a run file for an account."""
