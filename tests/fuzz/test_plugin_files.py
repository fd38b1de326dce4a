"""Method files that are broken or hostile: one sentence, which names the file where the fault is in it.

`profcil check` and `profcil run` execute the file. A method file is code and can do whatever its user can; these are
the faults of code that goes wrong, not of code that means to hide.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile import apply, edits, fuzz
from hypothesis import given
from hypothesis import strategies as st
from tally import attempt

from profcil import plugin_errors
from profcil.cli.main import main

SMALL = ["train.rounds=1", "train.epochs=1", "warmup.rounds=0", "clients=2", "participants=1", "task_size=5"]
RUN = ["run", "--quiet", "--out", "run", *(word for one in [*SMALL, "model.width=4"] for word in ("--set", one))]
COUNT = iter(range(10**9))
GOOD = """from dataclasses import dataclass
from profcil.extend import Method, Params, setting

@dataclass(frozen=True)
class MyParams(Params):
    scale: float = setting(0.5, "a number", low=0.0)

class Mine(Method):
    Params = MyParams
    modalities = frozenset({"image"})

    def label_space(self, client, inbox):
        return client.seen

METHOD = Mine
"""
RAISED = [
    *("ValueError('x')", "KeyError()", "SystemExit(0)", "SystemExit('bye')", "SystemExit(3)", "SystemExit(2.5)"),
    *(
        "RecursionError()",
        "MemoryError()",
        "GeneratorExit()",
        "StopIteration()",
        "OSError(28, 'x')",
    ),
    *(
        "FileNotFoundError(2, 'x', 'y')",
        "Unreadable()",
        "BaseException('z')",
        "NotImplementedError",
        "ExceptionGroup('g', [ValueError()])",
    ),
    *(
        "ValueError('l\\nl\\r\\x1b[2J\\u202e' * 3)",
        "ValueError('x' * 10**6)",
        "UnicodeDecodeError('utf-8', b'x', 0, 1, 'r')",
    ),
]
MESS = """
class Unreadable(Exception):
    def __str__(self):
        raise TypeError("no text")

class Odd:
    def __getattr__(self, name):
        raise RuntimeError(name)

def fail(*_, **__):
    raise {raised}

def recurse(*args, **more):
    return recurse(*args, **more)
"""
FAULTS = ["fail()", "recurse()", "import_nothing", "import nowhere_at_all", "1 / 0", "x = (", "\t x", "\x00", "raise"]
METHODS = [
    *(
        "None",
        "0",
        "''",
        "int",
        "Method",
        "Mine()",
        "Mine(None)",
        "[Mine]",
        "Odd()",
        "lambda: Mine",
        "type('M', (), {})",
    ),
    *(
        "type('M', (Mine,), {'Params': int})",
        "type('M', (Mine,), {'Params': None})",
        "type('M', (Mine,), {'Params': Odd()})",
    ),
    "type('M', (Mine,), {'__init__': fail})",
]
HOOKS = [
    *("__init__", "misfit", "attach", "dictionary", "begin", "broadcast", "broadcast_to", "turn", "label_space"),
    *("fit_loss", "aggregate", "opens", "surveys", "survey_blocks", "survey", "absorb", "reported", "end_position"),
    *("trains", "train_server", "views", "scores", "deployed", "temperature", "class_memories", "releases", "moving"),
]
ATTRIBUTES = ["modalities", "kinds", "exact_kinds", "additive", "server_gradients", "regimes", "Params", "__doc__"]
VALUES = [
    *(
        "None",
        "0",
        "-1",
        "''",
        "'x'",
        "b'x'",
        "[]",
        "{}",
        "()",
        "Odd()",
        "fail",
        "recurse",
        "Mine",
        "float('nan')",
        "10**30",
    ),
    *(
        "object()",
        "frozenset({'x'})",
        "frozenset({1})",
        "{'a': 1}",
        "property(fail)",
        "property(recurse)",
        "lambda *a: iter([])",
    ),
    *(
        "lambda *a: None",
        "lambda *a: 'x'",
        "lambda *a: (yield)",
        "lambda *a: (yield 1)",
        "lambda *a: Odd()",
        "lambda *a: a",
    ),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("methods")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PROFCIL_CACHE", str(folder / "cache"))
    yield
    shutil.rmtree(folder)


def look(capsys: pytest.CaptureFixture[str], verb: str, source: bytes) -> tuple[int, str]:
    """Status and text of a command on a method file."""
    file = Path(f"m{next(COUNT)}.py")
    file.write_bytes(source)
    shutil.rmtree("run", ignore_errors=True)
    with attempt() as one:
        status = main([*(RUN if verb == "run" else ["check"]), *(["--method"] if verb == "run" else []), f"./{file}"])
        out, err = capsys.readouterr()
        assert status in (0, 1, 2, 130), (source, status)
        assert "Traceback" not in out + err and len(err.splitlines()) <= 1, (source, err)
        assert len(err) < 2000 and "\x1b" not in err, (source, err)
        assert status == 0 or err or "DOES NOT HOLD" in out, (source, status)
        assert "unexpected" not in err or str(file) in err, (source, err)
        one.refused = status != 0
    file.unlink()
    return status, out + err


def method(raised: str, body: str = "", end: str = "") -> bytes:
    """The source of a method file with what can go wrong in it."""
    head, _, rest = GOOD.partition("class Mine")
    source = head + MESS.format(raised=raised) + "\nclass Mine" + rest.replace("\nMETHOD", f"{body}\nMETHOD") + end
    return source.encode()


@pytest.mark.parametrize("verb", ["run", "check"])
@fuzz
@given(changes=edits())
def test_damaged_sources(verb, changes, capsys):
    look(capsys, verb, apply(GOOD.encode(), changes))


@pytest.mark.parametrize("verb", ["run", "check"])
@fuzz
@given(raised=st.sampled_from(RAISED), fault=st.sampled_from([*FAULTS, *(f"METHOD = {m}" for m in METHODS)]))
def test_faults_at_import(verb, raised, fault, capsys):
    look(capsys, verb, method(raised, end=f"\n{fault}\n"))


@pytest.mark.parametrize("verb", ["run", "check"])
@fuzz
@given(raised=st.sampled_from(RAISED), name=st.sampled_from([*HOOKS, *ATTRIBUTES]), value=st.sampled_from(VALUES))
def test_faults_in_hooks(verb, raised, name, value, capsys):
    look(capsys, verb, method(raised, f"\n    {name} = {value}\n"))


@pytest.mark.parametrize("verb", ["run", "check"])
@pytest.mark.parametrize("raised", ["SystemExit(0)", "SystemExit('bye')", "BaseException()", "RecursionError()"])
def test_what_is_no_ordinary_exception_is_the_plug_ins_fault(verb, raised, capsys):
    source = method(raised, "\n    label_space = fail\n")
    name = raised.partition("(")[0]
    place = f".py, line {source.decode().splitlines().index(f'    raise {raised}') + 1}"
    status, text = look(capsys, verb, source)
    assert status == 1 and name in text and place in text
    status, text = look(capsys, verb, method(raised, end="\nfail()\n"))
    assert status == 2 and f"cannot be executed ({name}" in text and place in text


def test_a_method_that_interrupts_is_an_interrupt(capsys):
    status, text = look(capsys, "run", method("KeyboardInterrupt()", "\n    label_space = fail\n"))
    assert status == 130 and "profcil resume" in text


def test_a_wrong_result_of_a_hook_names_the_method(capsys):
    status, text = look(capsys, "run", method("0", "\n    turn = lambda *a: None\n"))
    assert status == 1 and "executor.py" in text and "`profcil check` tests it" in text


def test_the_good_method_is_one(capsys):
    """Else the tests above would test nothing."""
    Path("good.py").write_text(GOOD)
    assert main([*RUN, "--method", "./good.py"]) == 0, capsys.readouterr().err
    assert main(["check", "./good.py"]) == 0, capsys.readouterr().out


def test_an_error_that_hides_its_text_is_reported():
    class Silent(Exception):
        def __str__(self):
            raise ValueError

    assert plugin_errors.explained(Silent()) == "Silent: it has no readable text"
