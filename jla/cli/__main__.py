"""``python -m jla.cli`` is the command ``jla``."""

from jla.cli import app

if __name__ == "__main__":
    app(prog_name="jla")
