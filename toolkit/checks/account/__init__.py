"""Checks of the AWS account: the role, quotas, permissions, networks and file systems."""
