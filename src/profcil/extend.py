"""The stable names for plug-ins: everything that a method, dataset, encoder or logger of another package imports.

    from profcil.extend import Method, Params, reply, setting

Modules elsewhere in profcil may move; these names stay. `docs/extending.md` has complete examples. `import profcil`
does not import this module, which needs torch.
"""

from __future__ import annotations

from profcil.config import setting
from profcil.data.bundle import Bundle, Facts, File, Nodes, Rows
from profcil.data.files import locate
from profcil.engine.channel import Block, Inbox, Reply, ServerState, When, weights_of
from profcil.engine.client import Client
from profcil.engine.phases import Batch, Turn
from profcil.engine.server import Server
from profcil.errors import ConfigError, DataError, Failure, NotApplicable, ProfcilError
from profcil.loggers.base import Logger
from profcil.methods.base import Method, Params, Samples, average, reply
from profcil.methods.parts.addends import MODEL_MEANS, ClassRows, ModelMean, PlainSum
from profcil.model.dictionary import Dictionary, make_dictionary
from profcil.model.layers import BatchNorm, Columns, Pixels, drawn, image_shape
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net, Weights

__all__ = [  # noqa: RUF022 - by use
    # for methods
    "MODEL", "MODEL_MEANS", "Batch", "Block", "ClassRows", "Client", "Dictionary", "Inbox", "Method", "ModelMean",
    "Net", "Params", "PlainSum", "Reply", "Samples", "Server", "ServerState", "Turn", "Weights", "When",
    "average", "cross_entropy", "make_dictionary", "reply", "setting", "weights_of",
    # for datasets
    "Bundle", "Facts", "File", "Nodes", "Rows", "locate",
    # for encoders
    "BatchNorm", "Columns", "Pixels", "drawn", "image_shape",
    # for loggers
    "Logger",
    # errors
    "ConfigError", "DataError", "Failure", "NotApplicable", "ProfcilError",
]  # fmt: skip
