"""Measurements and tests of a cluster before a run: measure, doctor and canary."""
