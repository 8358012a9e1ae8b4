"""Checks files for what no other tool looks at: whitespace, size, TOML that parses.

python -m tools.check_files FILE ...    # prints what is wrong; exit status 1 if anything is
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

LARGEST = 2 * 2**20


def problems(path: Path) -> list[str]:
    """What is wrong with a file, one phrase each."""
    data, found = path.read_bytes(), []
    if len(data) > LARGEST:
        found.append(f"{len(data):,} bytes, the limit is {LARGEST:,}")
    if b"\0" in data:
        return found
    lines = data.split(b"\n")
    found += [
        f"line {number} ends in whitespace"
        for number, line in enumerate(lines, 1)
        if line != line.rstrip()
    ]
    if data and not data.endswith(b"\n"):
        found.append("no newline at the end")
    if data.endswith(b"\n\n"):
        found.append("empty lines at the end")
    if path.suffix == ".toml":
        try:
            tomllib.loads(data.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            found.append(f"not TOML: {error}")
    return found


def main() -> int:
    found = [f"{name}: {each}" for name in sys.argv[1:] for each in problems(Path(name))]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
