"""What a user can cause is said in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def one_line(debug: bool) -> Iterator[None]:
    """Prints an error as one line on stderr and exits: with 2 if a user can cause it, else with 1.

    With ``debug`` the error is raised as it is.
    """
    try:
        yield
    except (BrokenPipeError, typer.Exit):
        raise  # a reader that has seen enough is no error
    except Exception as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        expected = isinstance(error, OSError | ValueError)
        if not expected:
            text = f"{type(error).__name__}: {text} (--debug shows where)"
        typer.echo(f"jla: {text}", err=True)
        raise typer.Exit(2 if expected else 1) from None
