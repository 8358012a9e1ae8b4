"""Runs Python in a process of its own, with this checkout's package."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python(*args: str, **environment: str) -> str:
    """What ``python *args`` writes to stdout; fails with its stderr if it fails."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
