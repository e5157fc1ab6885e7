"""One file for each command, with a thin click command called ``command``.

A command's file imports only click and the standard library at the top, so that the command line
starts fast; everything else is imported inside the function.
"""
