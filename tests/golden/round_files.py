"""Lists the files of profcil that one round of PRO-MAX executes on a CPU, by the reference path.

    python tests/golden/round_files.py

The round is the last one of the second position of the golden image stream: the base moves, old memory is transported,
and clients are asked for statistics. A file counts if one of its functions is called. What runs at import does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def files_called(action: Callable[[], object]) -> list[str]:
    """The files of profcil whose functions an action calls, sorted."""
    import profcil

    root = str(Path(profcil.__file__).parent) + os.sep
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root):
            found.add(name.removeprefix(root).replace(os.sep, "/"))

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return sorted(found)


def last_round_of_second_position(folder: Path) -> Callable[[], object]:
    """The rounds before it are computed here; calling the result computes the round itself."""
    from profcil import registry
    from profcil.engine.channel import Channel, When
    from profcil.engine.evaluation import task_totals
    from profcil.engine.loop import compute_round
    from profcil.engine.run_state import RunState
    from profcil.engine.warmup import warm
    from profcil.engine.world import make_world
    from profcil.metrics.ledger import Ledger
    from profcil.metrics.scores import Scores
    from profcil.protocol.participation import participants
    from profcil.resolve import resolve

    flags = {"method": "promax", "dataset": "golden_image", "accelerate": "off"}
    world = make_world(resolve(None, flags, []), folder)
    method = registry.find("methods", "promax").METHOD(world.config.params)
    server = method.begin(warm(world, lambda *_: None).weights)
    state = RunState(server, Scores.empty(world.plan.positions, task_totals(world)), Ledger())
    channel = Channel(state.ledger, world.config.transfer, held=state.held)
    rounds = world.config.train.rounds

    def compute(position: int, round: int, clients: tuple[int, ...]) -> None:
        when = When("round", position, round, rounds)
        state.server, _ = compute_round(world, method, state, channel, clients, when)

    *before, last = [(p, r, participants(world.plan, p, r)) for p in range(2) for r in range(rounds)]
    for moment in before:
        compute(*moment)
    return lambda: compute(*last)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import small_data

    with tempfile.TemporaryDirectory(prefix="profcil-round-") as folder:
        os.environ["PROFCIL_CACHE"] = str(Path(folder) / "cache")
        small_data.install(Path(folder) / "plugin")
        print("\n".join(files_called(last_round_of_second_position(Path(folder)))))


if __name__ == "__main__":
    main()
