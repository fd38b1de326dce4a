"""Benchmarks of rounds and streams on this machine."""
