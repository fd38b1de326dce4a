"""Follow running and finished runs in a browser.

The page shows what runs, how far it is, how well it does and how long it takes; below it is that of `profcil report`,
which grows as runs finish. Deployments are shown, too. A run that was stopped says how to continue it.

Only this machine can open the page. --host makes it reachable from others and needs --token; it is sent without
encryption, so use it in a network that you trust, or tunnel the port. The server only reads.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from profcil.cli.parser import Parser
from profcil.errors import ConfigError

PORT = 8420


def add(parser: Parser) -> None:
    parser.add_argument(
        "runs", nargs="*", default=["runs"], metavar="RUNS", help="run folders or folders of runs (runs)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"port to listen on; 0 = any free one ({PORT})")
    parser.add_argument("--token", help="who opens the page must know this text ($PROFCIL_TOKEN)")
    parser.add_argument("--title", default="profcil runs", help="heading of the page")


def run(args: argparse.Namespace) -> int:
    from profcil.live.server import make_server
    from profcil.live.watcher import Watcher

    folders = [Path(path) for path in args.runs]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; give the folder that your runs are in, or make it")
    token = args.token or os.environ.get("PROFCIL_TOKEN") or ""
    with make_server(Watcher(folders, args.title), args.host, args.port, token) as server:
        print(f"{server.address} shows {', '.join(map(str, folders))}; stop it with Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped; the runs go on")
    return 0
