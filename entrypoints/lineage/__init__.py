"""What a job trained on, and in which steps."""

ENTRANCES = ("data_facts", "data_record", "record_log", "replacements")
"""Modules through which other wings enter."""
