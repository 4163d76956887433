"""The command `prospr`: what it is asked for, and how it ends. The commands themselves are in `prospr.lab.commands`.

Exit codes: 0 done, 1 failed, 2 the command line was not understood, 130 interrupted. torch is imported only once the
arguments are understood.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager

__all__ = ["main"]

DONE, FAILED, INTERRUPTED = 0, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; the exit code.

    >>> main(["--version"])
    prospr ...
    0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        from prospr import __version__

        print(f"prospr {__version__}")
        return DONE
    try:
        from prospr.lab.commands import parse
    except ModuleNotFoundError as error:
        return _failed(f"the command needs {error.name}: pip install 'prospect-pruning[lab]'")
    try:
        command = parse(words)
    except SystemExit as end:  # --help, or a command line that is not understood
        return end.code if isinstance(end.code, int) else FAILED
    except BrokenPipeError:
        return _unheard()
    try:
        with _short_warnings(not command.debug):
            command()
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"\nprospr: interrupted. {command.after_interrupt}".rstrip(), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return _unheard()
    except Exception as error:  # noqa: BLE001  whatever it was, it is told in one line, and in full with --debug
        if command.debug:
            traceback.print_exc()
            return FAILED
        return _failed(_message(error))
    return DONE


def _unheard() -> int:
    """`prospr methods | head`: what is left to print has nowhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _message(error: Exception) -> str:
    """What an error says; with its kind, where it was not made for people."""
    from prospr.errors import PruningError

    if isinstance(error, (PruningError, ValueError, OSError, ImportError)) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _failed(text: str) -> int:
    print(f"prospr: {text}", file=sys.stderr)
    return FAILED


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"prospr: warning: {message}\n"


@contextmanager
def _short_warnings(short: bool) -> Generator[None, None, None]:
    """Warnings in one line, without the place in the code."""
    before = warnings.formatwarning
    if short:
        warnings.formatwarning = _in_one_line  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        warnings.formatwarning = before
