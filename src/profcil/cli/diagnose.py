"""Diagnose a finished run: probes of its representation, alignment of its memory, gap between replay and real data.

The ridge and nearest-mean probes use all training data at once. They show whether a run lost accuracy by its
representation or by its memory and head. If predictions use more than the features of the final base (anchors), there
is a probe of everything that they use; if they use no base, it is the only one. Alignment is the cosine between
remembered and true means of old classes, as in the paper and with the common mean removed. The replay gap compares what
the method replays at the end with held-out examples, in the feature space of the warmed base encoder. Results are
written to the run folder: diagnostics.json, replay.npz and, for a run with --set keep_memories=true, snapshots.npz.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, data_dir, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder")
    data_dir(parser, "--data")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.deploy.sites.simulation import make_world
    from profcil.diagnostics.report import diagnose

    report = diagnose(Path(args.run), Path(args.data_dir) if args.data_dir else None, make_world)
    if args.json:
        print_json(report)
        return 0
    for line in (*probe_lines(report), *alignment_lines(report), *replay_lines(report)):
        print(line)
    return 0


def probe_lines(report: dict[str, Any]) -> Iterator[str]:
    probes = {"warmed base": report["probe_warm"], "final base": report["probe_final"]}
    if report["probe_seen"] != report["probe_final"]:
        probes["input of predictions"] = report["probe_seen"]
    for name, found in probes.items():
        if found:
            yield f"{name}: ridge {found['ridge']:.1f} %, nearest mean {found['nearest_mean']:.1f} %"


def alignment_lines(report: dict[str, Any]) -> Iterator[str]:
    for position, spaces in enumerate(report["alignment"], start=1):
        for space, found in spaces.items():
            cosines = f"align {found['align']:.3f}, centred {found['centred']:.3f}"
            yield f"position {position}, {space}: {cosines}, {found['classes']} old classes"


def replay_lines(report: dict[str, Any]) -> Iterator[str]:
    tasks = report["replay"]["tasks"] if report["replay"] else {}
    for task, gap in tasks.items():
        if gap:
            numbers = f"MMD² {gap['mmd2']:.3f}, W1 {gap['w1']:.3f}, cosine {gap['cosine']:.3f}"
            yield f"task {int(task) + 1}, replay: {numbers}"
