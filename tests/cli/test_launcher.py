"""`profcil study --launcher slurm`: the written files, and what a task of the array does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from profcil.cli.main import main

STUDY = """
methods = ["fedavg"]
seeds = [0, 1]
diagnose = true
set = ["train.rounds=1", "train.epochs=1", "warmup.rounds=1", "clients=4", "participants=2", "task_size=5"]
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "mine.toml").write_text(STUDY)
    assert main(["study", "mine.toml", "--out", "my cells", "--launcher", "slurm", "--jobs", "2"]) == 0
    written = tmp_path / "my cells" / "array.sbatch"
    assert f"sbatch {written}" in capsys.readouterr().out
    return written


def run_task(script: Path, number: int) -> subprocess.CompletedProcess[str]:
    """Does what Slurm does: runs the script in another folder, with the number of the task."""
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number)}
    return subprocess.run(["bash", str(script)], cwd="/", env=environment, capture_output=True, text=True)


def test_the_script_is_valid_and_has_a_task_per_run(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    names = (script.parent / "runs.txt").read_text().split()
    assert len(names) == 2 and all((script.parent / f"{name}.toml").exists() for name in names)
    assert "#SBATCH --array=1-2%2" in script.read_text()


def test_a_task_computes_its_run_and_the_study_uses_it(script, capsys):
    first, second = (script.parent / "runs.txt").read_text().split()
    done = run_task(script, 2)
    assert done.returncode == 0, done.stderr
    assert (script.parent / second / "diagnostics.json").exists() and not (script.parent / first).exists()
    assert main(["study", "mine.toml", "--out", "my cells", "--dry-run"]) == 0
    assert "2 runs, 1 of them to do" in capsys.readouterr().err
    assert main(["study", "mine.toml", "--out", "my cells", "--launcher", "slurm"]) == 0
    assert (script.parent / "runs.txt").read_text().split() == [first]


def test_an_unknown_launcher_and_a_dry_run_write_nothing(capsys, tmp_path):
    (tmp_path / "mine.toml").write_text(STUDY)
    assert main(["study", "mine.toml", "--launcher", "slrum"]) == 2
    assert "unknown launcher 'slrum'; did you mean slurm?" in capsys.readouterr().err
    assert main(["study", "mine.toml", "--launcher", "slurm", "--dry-run"]) == 0
    assert not Path("runs").exists()
