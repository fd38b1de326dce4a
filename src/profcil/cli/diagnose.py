"""Probe the representation of a finished run, and show how well its memory is aligned and how real its replay is.

The ridge and nearest-mean probes look at all training data at once: they tell whether a run lost by its
representation or by its memory and head. Where predictions see more than the final base's features, as with anchors,
there is a probe of all they see. Alignment is the cosine between remembered and true class means of old
classes, plain (the paper's) and with the common mean removed. The replay gap compares what the method replays at the
end with held-out examples, in the space of the warmed base encoder. The result is kept in the run folder:
diagnostics.json, replay.npz, and snapshots.npz where the run was made with --set keep_memories=true.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder")
    data_dir(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.diagnostics.report import diagnose

    report = diagnose(Path(args.run), Path(args.data_dir) if args.data_dir else None)
    if args.json:
        print_json(report)
        return 0
    shown = {"warmed base": report["probe_warm"], "final base": report["probe_final"]}
    if report["probe_seen"] != report["probe_final"]:
        shown["what predictions see"] = report["probe_seen"]
    for name, found in shown.items():
        print(f"{name}: ridge {found['ridge']:.1f} %, nearest mean {found['nearest_mean']:.1f} %")
    for position, spaces in enumerate(report["alignment"]):
        for space, a in spaces.items():
            cosines = f"align {a['align']:.3f}, centred {a['centred']:.3f}"
            print(f"position {position}, {space}: {cosines}, {a['classes']} old classes")
    for task, gap in (report["replay"] or {"tasks": {}})["tasks"].items():
        if gap:
            print(f"task {task}, replay: MMD² {gap['mmd2']:.3f}, W1 {gap['w1']:.3f}, cosine {gap['cosine']:.3f}")
    return 0
