"""Links names of the package in the pages to the reference: a hook of mkdocs."""

from __future__ import annotations

import re

# Not inside of a link that the page makes itself.
NAME = re.compile(r"(?<!\">)(?<!optional>)<code>(jla\.[\w.]+)</code>(?!</a>)")


def on_page_content(html: str, **_) -> str:
    """``<code>jla.ops.gla</code>`` becomes a link, where the name is documented."""
    return NAME.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)
