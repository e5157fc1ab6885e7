"""``sm-train review``: judges a job's use of time by its log and CloudWatch metrics."""
