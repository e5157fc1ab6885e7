"""The command line: packing, submitting, watching, and local runs."""
