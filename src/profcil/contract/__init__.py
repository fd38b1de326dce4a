"""The contract that every method must fulfil, and the small stream on which it is checked."""
