"""The tables of ``docs/coming-from/fla.md``: which layers and models of FLA are here.

python -m tools.fla_tables            # prints them
python -m tools.fla_tables --write    # puts them between the page's markers
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

from jla import layers
from jla.models import MODELS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coming-from" / "fla.md"
API = ROOT / "tests" / "golden" / "fla_api.jsonl"


def layers_table() -> str:
    """FLA's layers with their names here, and which are missing."""
    names = [entry["layer"] for entry in _fla_api() if "layer" in entry]
    aliases = {name: [] for name in names}
    for name in layers.__all__:
        target = getattr(layers, name).__name__
        if name != target:
            aliases[target].append(f"`jla.layers.{name}`")
    here = [name for name in names if name in layers.__all__]
    rows = [(f"`{name}`", f"`jla.layers.{name}`", ", ".join(aliases[name])) for name in here]
    missing = ", ".join(f"`{name}`" for name in names if name not in here)
    return f"{_table(('FLA', 'here', 'or'), rows)}\n\nNot here yet: {missing}."


def models_table() -> str:
    """Model types with their language models, and which are missing."""
    names = [entry["config"] for entry in _fla_api() if "config" in entry]
    here = [name for name in names if name in MODELS]
    rows = [(f"`{name}`", f"`jla.models.{MODELS[name].__name__}`") for name in here]
    missing = ", ".join(f"`{name}`" for name in names if name not in MODELS)
    return f"{_table(('model_type', 'language model'), rows)}\n\nNot here yet: {missing}."


TABLES = {"layers": layers_table, "models": models_table}


def _fla_api() -> list[dict]:
    """What was read from FLA 0.6.0: its layers and configs."""
    return [json.loads(line) for line in API.read_text(encoding="utf-8").splitlines()]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def updated(text: str) -> str:
    """The page with what stands between its markers replaced."""
    for name, table in TABLES.items():
        marks = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        text, count = marks.subn(lambda m, table=table: f"{m[1]}{table()}\n{m[2]}", text)
        assert count == 1, f"{PAGE.name} needs the markers of {name} once"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="update the page")
    if parser.parse_args().write:
        PAGE.write_text(updated(PAGE.read_text()))
    else:
        print("\n\n".join(table() for table in TABLES.values()))


if __name__ == "__main__":
    main()
