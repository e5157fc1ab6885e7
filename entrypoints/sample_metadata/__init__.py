"""Captions, columns, and conditions on them."""

ENTRANCES = (
    "captions",
    "color_counts",
    "column_types",
    "dates",
    "row_filter",
    "sample_rng",
    "text_columns",
    "transform",
)
"""Modules through which other wings enter."""
