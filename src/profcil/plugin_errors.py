"""What a plug-in raised, in one line, and where. A plug-in may raise anything, also what is no `Exception`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from profcil.errors import BrokenPlugin
from profcil.io.texts import one_line


def explained(error: BaseException) -> str:
    """Type and reason of an error, with file and line if they are a plug-in's."""
    reason = reason_of(error)
    what = type(error).__name__ + (f": {reason}" if reason else "")
    return what + (place_of(error) if in_plugin(error) else "")


def reason_of(error: BaseException) -> str:
    """The text of an error, which may be long, have several lines, or itself raise an error."""
    try:
        return one_line(" ".join(str(error).split()))
    except Exception:
        return "it has no readable text"


def place_of(error: BaseException) -> str:
    """File and line of the last plug-in function that an error passed through; else of the last one of profcil."""
    places = {is_plugin: place for is_plugin, place in places_of(error)}
    return places.get(True, places.get(False, ""))


def in_plugin(error: BaseException) -> bool:
    """Whether an error passed through a function of a plug-in."""
    return any(is_plugin for is_plugin, _ in places_of(error))


def places_of(error: BaseException) -> Iterator[tuple[bool, str]]:
    """File and line of the functions of plug-ins (True) and of profcil that an error passed through."""
    from profcil.registry import is_plugin_module

    for frame, line in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        is_plugin = is_plugin_module(module)
        if is_plugin or module.partition(".")[0] == "profcil":
            yield is_plugin, f" in {frame.f_code.co_filename}, line {line}"


def after_method_files() -> str:
    """The method file that was executed last: what it returned may be the cause of an error elsewhere."""
    from profcil.registry import FILE_MODULE

    files = [module.__file__ for name, module in sys.modules.items() if name.startswith(FILE_MODULE)]
    return f", with the method {files[-1]} (`profcil check` tests it)" if files else ""


@contextmanager
def as_broken_plugin(what: str, advice: str) -> Iterator[None]:
    """Whatever foreign code raises within, except Ctrl-C, becomes the sentence that the plug-in is broken."""
    try:
        yield
    except (BrokenPlugin, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BrokenPlugin(f"{what} ({explained(error)}); {advice}") from error
