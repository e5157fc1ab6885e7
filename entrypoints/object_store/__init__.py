"""S3: every client and every request, with the owner and the encryption of the bucket."""
