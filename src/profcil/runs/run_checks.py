"""Whether the files of a run belong together: unchanged since the run, of one plan, with scores that are possible."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import RunFolderError
from profcil.runs.digests import changed_files
from profcil.runs.run_files import advise_resume, changed_message, explain_read_errors
from profcil.runs.settings_check import MACHINE, check_settings, flatten_settings

if TYPE_CHECKING:
    from profcil.runs.reader import Run

NAMES = ("dataset", "method", "setting", "seed")
# Keys of the recorded settings that need not agree with config.toml. `deployed` only prevents `profcil resume`.
NOT_IN_CONFIG = (*MACHINE, "deployed")


def check_consistency(run: Run) -> None:
    """Refuses files that contradict each other, and a finished run without its scores."""
    tasks = run.plan.positions
    is_named = all(name in run.config for name in NAMES) and "done" in run.facts
    is_same_plan = run.facts.get("plan", run.plan.digest) == run.plan.digest
    shapes = run.scores.correct.shape, run.scores.total.shape
    if not is_named or not is_same_plan or shapes != ((tasks, tasks), (tasks,)):
        raise RunFolderError(f"the files in {run.path} do not belong together; {advise_resume(run.path)}")
    with explain_read_errors(run.path / "run.json"):
        recorded = run.facts.get("config", {}).items()
        original = {key: value for key, value in recorded if key not in NOT_IN_CONFIG}
    check_settings(run.path, original, flatten_settings(run.config))
    if run.done and (run.scores.correct[-1] < 0).any():
        raise RunFolderError(f"{run.path} is marked as done but lacks scores; {advise_resume(run.path)}")


def check_unchanged(path: Path, facts: dict[str, Any]) -> None:
    """Refuses files that were changed after the run wrote them."""
    with explain_read_errors(path / "run.json"):
        changed = list(changed_files(path, facts))
    if changed:
        raise RunFolderError(changed_message(path, changed[0]))


def check_scores(run: Run) -> None:
    """Refuses more correct predictions than examples."""
    correct = run.scores.correct
    is_possible = (correct >= -1) & (correct <= run.scores.total)
    if not is_possible.all():
        p, task = (int(k) for k in np.argwhere(~is_possible)[0])
        raise RunFolderError(
            f"{run.path}/scores.json has {correct[p, task]} correct of {run.scores.total[task]} for task {task + 1} at "
            f"position {p + 1}; {advise_resume(run.path)}"
        )
