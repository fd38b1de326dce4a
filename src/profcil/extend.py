"""The stable names for plug-ins: everything that a method, dataset or encoder of another package imports.

    from profcil.extend import Method, Params, reply, setting

Modules elsewhere in profcil may move; these names stay. `docs/extending.md` has complete examples. `import profcil`
does not import this module, which needs torch.
"""

from __future__ import annotations

from profcil.config import setting
from profcil.data.bundle import Bundle, Facts, File, Nodes, Rows
from profcil.data.files import locate
from profcil.engine.channel import When
from profcil.engine.client import Client
from profcil.engine.payload import Block, Inbox, Reply, ServerState, weights_of
from profcil.engine.phases import Batch, Turn
from profcil.engine.server import Server
from profcil.errors import ConfigError, DataError, Failure, NotApplicable, ProfcilError
from profcil.methods.base import Method, Params, Samples, average, reply
from profcil.model.dictionary import Dictionary, make_dictionary
from profcil.model.layers import BatchNorm, Columns, Pixels, drawn, image_shape
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Weights

__all__ = [  # noqa: RUF022 - by use
    # for methods
    "MODEL", "Batch", "Block", "Client", "Dictionary", "Inbox", "Method", "Net", "Params", "Reply", "Samples", "Server",
    "ServerState", "Turn", "Weights", "When", "average", "cross_entropy", "make_dictionary",
    "reply", "setting", "weights_of",
    # for datasets
    "Bundle", "Facts", "File", "Nodes", "Rows", "locate",
    # for encoders
    "BatchNorm", "Columns", "Pixels", "drawn", "image_shape",
    # errors
    "ConfigError", "DataError", "Failure", "NotApplicable", "ProfcilError",
]  # fmt: skip
