"""What a user can cause is said in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

# Modules that come with an extra of this distribution.
EXTRAS = {"lm_eval": "eval", "datasets": "eval", "orbax": "train"}


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
        extra = missing_extra(error)
        if extra is not None:
            text = f"this needs the extra '{extra}': pip install 'jla-nnx[{extra}]' ({text})"
        expected = isinstance(error, OSError | ValueError) or extra is not None
        if not expected:
            text = f"{type(error).__name__}: {text} (--debug shows where)"
        typer.echo(f"jla: {text}", err=True)
        raise typer.Exit(2 if expected else 1) from None


def missing_extra(error: Exception) -> str | None:
    """The extra that would have brought a module that was not found."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    return EXTRAS.get((error.name or "").partition(".")[0])
