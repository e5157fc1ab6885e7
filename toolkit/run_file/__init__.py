"""The run file: loaded, with the facts of its index and its placeholders."""

ENTRANCES = ("index_facts", "placeholders", "run_file")
"""Modules through which other wings enter."""
