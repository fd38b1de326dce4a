"""`python -m profcil`: the command line."""

import sys

from profcil.cli.main import main

sys.exit(main())
