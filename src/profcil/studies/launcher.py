"""Writes the unfinished runs of a study as a job array of Slurm, instead of running them here.

The folder of the study gets a recipe for each run, `runs.txt` with a name a line, and `array.sbatch`, whose task number
N computes the run in line N. A task whose run was interrupted resumes it. When the jobs are done, the same study
command prints the table.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from profcil.config import OWN
from profcil.io.atomic_files import write_text
from profcil.resolve import to_toml
from profcil.studies.definition import Cell, is_finished

LAUNCHERS = ("local", "slurm")
SCRIPT = """#!/bin/bash
#SBATCH --job-name=profcil
#SBATCH --array=1-{tasks}{at_once}
#SBATCH --cpus-per-task=1
#SBATCH --output={out}/slurm-%A-%a.out
# Other options, such as partition, time or GPU: add lines here, or give them to sbatch.
set -euo pipefail
cd {here}
name=$(sed -n "${{SLURM_ARRAY_TASK_ID}}p" {out}/runs.txt)
run={out}/$name
if [ -e "$run/state.safetensors" ]; then
  {profcil} resume "$run" {data} --quiet
else
  {profcil} run "$run.toml" --out "$run" {data} --quiet
fi
"""
DIAGNOSE = '{profcil} diagnose "$run" --data-dir {data_dir}\n'


def write_array(cells: Sequence[Cell], out: Path, data_dir: Path, jobs: int, diagnose: bool) -> Path | None:
    """Writes recipes, the list of runs and the job array. Returns the script; None if nothing is left to run."""
    by_name = {cell.name: cell for cell in cells if cell.applicable and not is_finished(out, cell)}
    if not by_name:
        return None
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name, cell in by_name.items():
        write_text(out / f"{name}.toml", to_toml(cell.config))
    write_text(out / "runs.txt", "\n".join(by_name) + "\n")
    write_text(out / "array.sbatch", array_script(list(by_name.values()), out, data_dir.absolute(), jobs, diagnose))
    return out / "array.sbatch"


def array_script(cells: Sequence[Cell], out: Path, data_dir: Path, jobs: int, diagnose: bool) -> str:
    """The text of the job array; with several jobs at most as many tasks at a time."""
    profcil = f"{shlex.quote(sys.executable)} -m profcil"
    data_flag = "--data" if cells[0].config.dataset == OWN else "--data-dir"
    text = SCRIPT.format(
        tasks=len(cells),
        at_once=f"%{jobs}" if jobs > 1 else "",
        out=shlex.quote(str(out)),
        here=shlex.quote(str(Path.cwd())),
        profcil=profcil,
        data=f"{data_flag} {shlex.quote(str(data_dir))}",
    )
    return text + (DIAGNOSE.format(profcil=profcil, data_dir=shlex.quote(str(data_dir))) if diagnose else "")
