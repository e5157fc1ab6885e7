"""Judges jobs: why they failed, how well they used their time and what they cost."""
