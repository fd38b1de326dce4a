"""What things cost on this machine, measured. Benchmarks, not tests: nothing here passes or fails."""
