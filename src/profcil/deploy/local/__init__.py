"""What is done on one machine: a federation of local processes, and the folder of a new deployment."""
