"""The command line, ``jla``; importing it loads no JAX."""

from jla.cli.commands import app

__all__ = ["app"]
