"""Small seeded runs of every method, and digests of what they end with.

    python tests/golden/golden_runs.py --path reference|default [--device cuda] [--out FILE]

The script uses public names of profcil only, so that it runs on any commit: `make golden-compare BASE=rev` runs it on
two commits on the same machine and compares the digests. Bits depend on torch, the compiler and the processor; `key`
names these.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent

ANY = ("fedavg", "fedprox", "fedproto", "fedspace", "fedssi", "fedcbdr", "pro", "promax", "prolin")
IMAGE = (*ANY, "hr", "promax-global", "promax-covariance", "pro-literal", "prolin-dictionary", "probayes")
DEEP = ("fedavg", "pro", "promax", "prolin", "target", "mfcl", "fedssi")
TEXT = (*ANY, "fedseit", "prolin-dictionary", "prolin-contexts", "probayes", "probayes-hashes")
GRAPH = (*ANY, "power", "motion", "promax-global", "prolin-dictionary", "probayes")
GPU = ("fedavg", "fedprox", "promax", "prolin", "target", "mfcl", "hr", "fedssi", "fedcbdr", "fedspace")

# Settings of a method's plain run. A server's own training takes most of the time of some: a few steps show every line.
BRIEF: dict[str, dict[str, Any]] = {
    "target": {"synthesis_rounds": 1, "synthesis_steps": 3, "student_steps": 3, "pool": 8},
    "mfcl": {"iterations": 4},
    "probayes": {"dictionary": 60},
    # Defaults of 0.2.0, so that a change of defaults changes no digest.
    "pro": {"fit_space": "remembered", "merge": "counts"},
    "promax": {"fit_space": "remembered", "merge": "counts"},
}
# Settings that take other lines of a method than its defaults do.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "promax-global": ("promax", {"transport": "global", "head": "cosine", "adapted_bank": True, "base_rounds": 1}),
    "pro-literal": ("pro", {"fit_when_frozen": True, "refresh_at": "final", "norm": "batch"}),
    "prolin-dictionary": ("prolin", {"dictionary": 60, "base_rounds": 1}),
    "prolin-contexts": ("prolin", {"dictionary": 60, "text_entries": "contexts", "base_rounds": 0}),
    "probayes-hashes": ("probayes", {"dictionary": 60, "text_entries": "hashes"}),
    "promax-covariance": ("promax", {"covariance": "shared", "closed_head": True, "keep_scores": 1.0}),
}


def cases(device: str) -> Iterator[tuple[str, str, str]]:
    """Name, dataset and method of every run."""
    if device != "cpu":
        sets = {"golden_cifar": GPU}
    else:
        sets = {"golden_image": IMAGE, "golden_resnet": DEEP, "golden_text": TEXT, "golden_graph": GRAPH}
    for dataset, methods in sets.items():
        for method in methods:
            yield f"{dataset.removeprefix('golden_')}/{method}", dataset, method


def plain_path() -> dict[str, Any]:
    """The settings that choose the reference path."""
    from profcil.resolve import RunConfig

    names = {f.name for f in dataclasses.fields(RunConfig)}
    return {"accelerate": "off"} if "accelerate" in names else {"executor": "serial", "graphs": False}


def digest(*parts: bytes) -> str:
    total = hashlib.blake2b(digest_size=12)
    for part in parts:
        total.update(part)
    return total.hexdigest()


def outcome(folder: Path) -> dict[str, Any]:
    """Digests of final tensors, scores and ledger. Names of tensors do not count, so that they may change."""
    from safetensors.torch import load_file

    import profcil

    tensors = load_file(folder / "state.safetensors")
    each = sorted(digest(f"{t.dtype} {tuple(t.shape)}".encode(), t.numpy().tobytes()) for t in tensors.values())
    run = profcil.load_run(folder)
    ledger = sorted((folder / "ledger.csv").read_text().splitlines()[1:])
    floating = [t.double() for t in tensors.values() if t.is_floating_point() and t.numel()]
    return {
        "weights": digest("".join(each).encode()),
        "scores": digest(run.scores.correct.astype("int64").tobytes()),
        "ledger": digest("\n".join(ledger).encode()),
        "norm": sum(float(t.square().sum()) for t in floating) ** 0.5,
        "metrics": {k: round(v, 3) for k, v in (run.metrics or {}).items()},
    }


def play(path: str, device: str, wanted: str = "") -> dict[str, dict[str, Any]]:
    """The outcome of every run by name."""
    import small_data

    import profcil

    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="profcil-golden-") as folder:
        os.environ["PROFCIL_CACHE"] = str(Path(folder) / "cache")
        small_data.install(Path(folder) / "plugin")
        settings = plain_path() if path == "reference" else {}
        for name, dataset, method in cases(device):
            if wanted not in name:
                continue
            out = Path(folder) / name.replace("/", "-")
            method, chosen = VARIANTS.get(method, (method, BRIEF.get(method, {})))
            chosen = {**settings, **chosen}
            profcil.run(dataset=dataset, method=method, device=device, settings=chosen, out=out)
            found[name] = outcome(out)
            print(name, found[name]["weights"], found[name]["metrics"], file=sys.stderr, flush=True)
    return found


def key(device: str) -> str:
    """What bits depend on: torch, and the GPU, or the compiler and the processor."""
    import torch

    if device != "cpu":
        return " | ".join([f"torch {torch.__version__}", torch.cuda.get_device_name()])
    return " | ".join([f"torch {torch.__version__}", compiler(), processor()])


def compiler() -> str:
    try:
        done = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "no compiler"


def processor() -> str:
    """The processor's name and a digest of its flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    facts = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    flags = facts.get("flags", facts.get("Features", ""))
    return f"{facts.get('model name', platform.machine())} ({digest(flags.encode())[:8]})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", choices=("reference", "default"), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if args.path == "reference":
        os.environ["CC"] = "false"  # no compiled kernels, on commits whose switch leaves them on
    found = {"key": key(args.device), "path": args.path, "runs": play(args.path, args.device, args.only)}
    text = json.dumps(found, indent=1, sort_keys=True)
    args.out.write_text(text + "\n") if args.out else print(text)


if __name__ == "__main__":
    main()
