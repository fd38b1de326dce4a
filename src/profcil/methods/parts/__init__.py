"""Ingredients that methods share; each is tensors in, tensors out, and knows nothing of clients or rounds."""
