"""The same methods on real machines: a guest in Flower's deployment, with the one loop on its server."""
