"""The server of a deployment: which node computes for which client, requests and replies, and growth."""
