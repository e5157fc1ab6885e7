"""What jobs store about themselves: uploads, the budget's rule and results of the doctor."""

ENTRANCES = ("budget", "doctor_results", "upload_lag", "upload_notes")
"""Modules through which other wings enter."""
