"""The laptop: the command line, packing, submitting, local runs."""
