"""Building blocks that methods share."""
