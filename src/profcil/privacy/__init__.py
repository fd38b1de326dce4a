"""What protects the examples behind the clients' replies: noise and its accounting, minimum support, secure sums."""
