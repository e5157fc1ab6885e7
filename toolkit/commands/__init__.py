"""The commands, one thin file each, with a click command called ``command``.

A command's file imports only click and the standard library at the top, so that the command line
starts fast; everything else is imported inside the function. Commands of optional wings lie in
their folders ``commands``.
"""
