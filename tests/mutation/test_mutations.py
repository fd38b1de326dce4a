"""Every mutation of the source makes a test fail."""

from __future__ import annotations

import mutate
import pytest
from mutate import MUTATIONS
from mutations import Mutation


def test_every_mutation_can_be_applied_and_has_a_name_of_its_own() -> None:
    """A text that was changed in the source is an error that names the mutation."""
    assert [error for mutation in MUTATIONS if (error := mutate.trouble(mutation))] == []
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)


def test_a_mutation_that_cannot_be_applied_is_named() -> None:
    """Neither a text that occurs twice, nor one that does not occur, nor a lost file is passed over."""
    for file, old in (("engine/loop.py", "state"), ("engine/loop.py", "no such text"), ("engine/lost.py", "x")):
        wrong = Mutation("a wrong one", file, old, "", "", ())
        assert "a wrong one" in mutate.trouble(wrong)


@pytest.mark.slow
def test_the_tests_pass_on_the_unchanged_source() -> None:
    """Otherwise every mutation would seem to be killed."""
    tests = sorted({name for mutation in MUTATIONS for name in mutation.tests})
    passed, output = mutate.passes(tests)
    assert passed, output


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_killed(mutation: Mutation) -> None:
    """The tests named beside it fail on the mutated source."""
    survived, output = mutate.passes(mutation.tests, mutation)
    assert not survived, f"{mutation.breaks} No test of {', '.join(mutation.tests)} fails.\n{output}"
