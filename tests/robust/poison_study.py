"""FAA of runs with liars: honest, plain mean and robust, for every attack.

python tests/robust/poison_study.py --method promax --setting severe --rule clipped --seeds 3
python tests/robust/poison_study.py --curve                     # one to four liars of ten
python tests/robust/poison_study.py --cost                      # what each rule costs where nobody lies
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attacks import ATTACKS, Attack
from liars import lying_world

from profcil.engine import run
from profcil.errors import ProfcilError
from profcil.resolve import resolve

SHORT = ("task_size=5", "train.rounds=5", "train.epochs=2", "warmup.rounds=2")  # a fifth of the digits recipe's work
SHORT_CLINC = ("task_size=30", *SHORT[1:])
METHODS = ("fedavg", "pro", "promax", "prolin")
TARGETS = {  # what each method sends
    "fedavg": ("model",),
    "pro": ("model", "rows"),
    "promax": ("model", "rows", "transport"),
    "prolin": ("rows", "matrix", "sums"),
}
RULES = ("clipped", "median", "trimmed", "krum", "geometric")
WORST = {  # by name, for the curve
    "fedavg": "update x -100",
    "pro": "update with its sign flipped",
    "promax": "shifts of 100, confidence 5",
    "prolin": "means with their sign flipped",
}


def poisoned_run(
    folder: Path,
    method: str,
    rule: str,
    attack: Attack | None = None,
    liars: Collection[int] = (2,),
    *,
    dataset: str = "digits",
    setting: str = "homogeneous",
    seed: int = 0,
    data: str = ".",
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """What run.json says of one run, with its events. A run that ends with an error has an FAA of 0.

    The cache of honest starts is under `folder`; a false warm-up and a false dictionary are not shared.
    """
    sets = ["threads=1", "workers=1", f"aggregation={rule}", *more]
    config = resolve(flags={"dataset": dataset, "method": method, "setting": setting, "seed": seed}, sets=sets)
    honest_start = attack is None or attack.target in ("rows", "transport", "matrix")
    cache = folder / ("honest cache" if honest_start else "false cache")
    for stage in ("warmup", "dictionary") if not honest_start else ():
        shutil.rmtree(cache / stage, ignore_errors=True)
    os.environ["PROFCIL_CACHE"] = str(cache)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            out = run.start(config, Path(own) / "run", Path(data), make=lying_world(attack, liars))
        except ProfcilError as error:
            return {"metrics": {"faa": 0.0}, "error": str(error), "events": []}
        facts = json.loads((out / "run.json").read_text())
        facts["events"] = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return facts


def dropped_replies(facts: dict[str, Any]) -> list[tuple[int, str]]:
    """The clients whose replies were dropped, and why, round by round."""
    return [(int(c), why) for e in facts["events"] for c, why in e.get("dropped", {}).items()]


def applicable(method: str) -> list[Attack]:
    """The attacks on what a method sends; those on second moments per class need such moments."""
    found = [a for a in ATTACKS if a.target in TARGETS[method]]
    return [a for a in found if not (method == "prolin" and a.name.startswith("second moments"))]


def short_settings(dataset: str, method: str) -> tuple[str, ...]:
    """The settings of a short run."""
    if dataset != "clinc150":
        return SHORT
    return (*SHORT_CLINC, "params.dictionary=2000") if method == "prolin" else SHORT_CLINC


def mean_accuracy(args: argparse.Namespace, rule: str, attack: Attack | None, liars: Collection[int]) -> float:
    """The mean FAA over seeds. Errors, and replies of honest clients that were dropped, are printed on stderr."""
    more: dict[str, Any] = {"dataset": args.dataset, "setting": args.setting, "data": args.data}
    more["more"] = short_settings(args.dataset, args.method) if args.short else ()
    found = []
    for seed in range(args.seeds):
        facts = poisoned_run(Path(args.folder), args.method, rule, attack, liars, seed=seed, **more)
        found.append(facts["metrics"]["faa"])
        wrongly = [(c, why) for c, why in dropped_replies(facts) if c not in liars]
        if wrongly or "error" in facts:
            what = attack.name if attack else "nobody lies"
            line = (args.method, args.setting, rule, what, seed, wrongly, facts.get("error", ""))
            print(*line, file=sys.stderr, flush=True)
    return fmean(found)


def print_attacks(args: argparse.Namespace) -> None:
    """A line for each attack: honest, plain mean, robust."""
    honest = mean_accuracy(args, "mean", None, ())
    alone = mean_accuracy(args, args.rule, None, ())
    print(f"| {args.method} | nobody lies | {honest:.1f} | {honest:.1f} | {alone:.1f} |", flush=True)
    for attack in [a for a in applicable(args.method) if any(t in a.name for t in args.only)]:
        plain = mean_accuracy(args, "mean", attack, args.liars)
        robust = mean_accuracy(args, args.rule, attack, args.liars)
        print(f"| {args.method} | {attack.name} | {honest:.1f} | {plain:.1f} | {robust:.1f} |", flush=True)


def print_curve(args: argparse.Namespace) -> None:
    """A line for each number of liars."""
    attack = next(a for a in ATTACKS if a.name == (args.attack or WORST[args.method]))
    for number in range(5):
        plain = mean_accuracy(args, "mean", attack if number else None, range(number))
        robust = mean_accuracy(args, args.rule, attack if number else None, range(number))
        print(f"| {args.method} | {attack.name} | {number} | {plain:.1f} | {robust:.1f} |", flush=True)


def print_cost(args: argparse.Namespace) -> None:
    """A line with the FAA of every rule where nobody lies."""
    found = [mean_accuracy(args, rule, None, ()) for rule in ("mean", *RULES)]
    print(f"| {args.method} | {args.setting} | " + " | ".join(f"{faa:.1f}" for faa in found) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="", help="one of " + ", ".join(METHODS) + "; empty = all")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--data", default=".")
    parser.add_argument("--setting", default="homogeneous")
    parser.add_argument("--rule", default="clipped", choices=RULES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--attack", default="")
    parser.add_argument("--liars", type=int, nargs="+", default=[2])
    parser.add_argument("--short", action="store_true", help="two positions of five rounds")
    parser.add_argument("--only", nargs="+", default=[""], help="attacks whose names contain one of these texts")
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--cost", action="store_true")
    args = parser.parse_args()
    show = print_curve if args.curve else print_cost if args.cost else print_attacks
    with tempfile.TemporaryDirectory() as args.folder:
        for method in [args.method] if args.method else METHODS:
            args.method = method
            show(args)


if __name__ == "__main__":
    main()
