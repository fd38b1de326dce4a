"""What every method must honour, and a small stream to look at it."""
