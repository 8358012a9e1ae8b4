"""The README's status table, made from the code: which mixers there are and what each has.

python -m tools.status_table            # prints the table
python -m tools.status_table --write    # puts it between the README's markers
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jla import layers, ops
from jla.layers import TokenMixer
from jla.models import MODELS
from jla.ops.kinds import KINDS

ROOT = Path(__file__).parent.parent
README, GOLDEN = ROOT / "README.md", ROOT / "tests" / "golden"
# The documentation shows what stands between them, too.
BEGIN, END = "<!-- --8<-- [start:status] -->", "<!-- --8<-- [end:status] -->"
FORMS = ("reference", "chunk", "mosaic")
HEAD = ["mixer", "paper", "reference", "chunk", "Hopper kernel", "models", "parity with FLA 0.6.0"]


def table() -> str:
    """The table in Markdown, a row per mixer."""
    rows = [HEAD, ["---"] * len(HEAD), *(row(mixer) for mixer in mixers())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def mixers() -> list[type[TokenMixer]]:
    """Concrete mixers of ``jla.layers`` by name, each once however many names it has."""
    found = {getattr(layers, name) for name in layers.__all__} - {TokenMixer}
    return sorted((m for m in found if issubclass(m, TokenMixer)), key=lambda m: m.__name__)


def row(mixer: type[TokenMixer]) -> list[str]:
    """One mixer's cells; empty where there is nothing."""
    have = forms(mixer)
    families = models(mixer)
    return [
        f"`{mixer.__name__}`",
        paper(mixer),
        *("yes" if form in have else "" for form in FORMS),
        ", ".join(f"`{family}`" for family in families),
        parity(mixer, families),
    ]


def paper(mixer: type[TokenMixer]) -> str:
    """The arXiv number in the docstring of the mixer's module."""
    doc = sys.modules[mixer.__module__].__doc__ or ""
    found = re.search(r"arXiv:\s*(\d+\.\d+)", doc)
    return f"[{found[1]}](https://arxiv.org/abs/{found[1]})" if found else ""


def forms(mixer: type[TokenMixer]) -> set[str]:
    """Implementations of the recurrence that the mixer's module calls, whatever the machine."""
    used = {name for name in vars(sys.modules[mixer.__module__]) if name in KINDS}
    assert len(used) == 1, f"{mixer.__module__} must import its one op from jla.ops, has {used}"
    wide = jax.ShapeDtypeStruct((1, 256, 1, 128), jnp.bfloat16)
    refused = ops.explain(used.pop(), *4 * [wide]).refused
    return {form for form in FORMS if "no Hopper kernel" not in refused.get(form, "")}


def models(mixer: type[TokenMixer]) -> list[str]:
    """Model types whose module names the mixer."""
    return [
        model_type
        for model_type, family in MODELS.items()
        if mixer in vars(sys.modules[family.__module__]).values()
    ]


def parity(mixer: type[TokenMixer], families: list[str]) -> str:
    """How many of FLA's recorded cases the tests compare with."""
    layer, model = recorded("layer", [mixer.__name__]), recorded("model", families)
    if not layer + model:
        return ""
    plural = "" if model == 1 else "s"
    return f"{layer} layer, {model} model case{plural}"


def recorded(kind: str, prefixes: list[str]) -> int:
    names = [path.name.split(".")[0].split("__")[0] for path in (GOLDEN / kind).glob("*.xz")]
    return sum(name in prefixes for name in names)


def updated(text: str) -> str:
    """The README with the table between its markers replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="update README.md")
    if parser.parse_args().write:
        README.write_text(updated(README.read_text()))
    else:
        print(table())


if __name__ == "__main__":
    main()
