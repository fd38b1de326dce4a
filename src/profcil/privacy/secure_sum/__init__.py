"""Secure summation: the server learns the sum of several clients' numbers, and no client's own.

`protocol` has the four rounds of messages (Bonawitz et al., 2017) as functions of the client and of the server.
`fixed_point`, `masks` and `shares` are what it is made of; `simulation` runs all parties in one process.
"""
