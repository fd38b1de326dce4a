"""profcil: heterogeneous federated class-incremental learning on one machine or many."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("profcil")
except PackageNotFoundError:  # run from a source tree that was not installed
    __version__ = "0.1.0"

__all__ = ["__version__"]
