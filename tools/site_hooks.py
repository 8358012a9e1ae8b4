"""Hooks of mkdocs: names become links to the reference, the command line documents itself."""

from __future__ import annotations

import re
import subprocess
import sys

# Not inside of a link that the page makes itself.
NAME = re.compile(r"(?<!\">)(?<!optional>)<code>(jla\.[\w.]+)</code>(?!</a>)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """The page of the command gets what typer tells of it."""
    if page.file.src_uri != "reference/cli.md":
        return markdown
    documented = subprocess.run(
        [sys.executable, "-m", "typer", "jla.cli", "utils", "docs", "--name", "jla"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return documented.replace("```console\n$ ", "```sh\n")


def on_page_content(html: str, **_) -> str:
    """``<code>jla.ops.gla</code>`` becomes a link, where the name is documented."""
    return NAME.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)
