"""Output on a terminal: tables, messages, questions and interrupts."""

ENTRANCES = (
    "confirmation",
    "console",
    "csv_text",
    "formatting",
    "interrupts",
    "json_record",
    "rich_table",
    "text_table",
)
"""Modules through which other wings enter."""
