"""One file a command; each holds a click command called ``command`` and stays thin.

Only click and the standard library are imported at the top of a command's file, so that the
command line starts fast; everything else is imported inside the function.
"""
