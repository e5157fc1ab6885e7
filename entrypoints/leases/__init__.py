"""Leases: the exclusive right of a process or job to do something, stored in S3 or in a folder."""
