"""Runs methods on real machines with Flower. The server runs the same loop as the simulation."""
