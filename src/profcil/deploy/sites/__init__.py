"""Sites with their own data: what they agree on, read and declare, and their simulation in one process."""
