"""Reads this package's docstrings for the API reference: an extension of griffe.

Some habits of the docstrings are not Markdown in Google's style: names stand in roles such as
``:func:`jla.ops.gla```, which become links where the name has a page; ``Example:`` is called
``Examples:`` there; a formula or table may follow its sentence without an empty line. And the
fields of a config, which need no docstrings each, are listed.
"""

from __future__ import annotations

import re

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`([\w.]+)`")
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
# An indented line behind text that is not the head of a section.
SECTIONS = "Args|Attributes|Examples|Raises|Returns"
INDENTED = re.compile(rf"^(?!(?:{SECTIONS}):$)(\S.*)\n(?= {{4}}\S)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value, obj)

    def on_class(self, *, cls: griffe.Class, **_) -> None:
        if cls.docstring is not None and cls.name.endswith("Config"):
            cls.docstring.value += fields(cls)


def rewritten(text: str, scope: griffe.Object) -> str:
    """A docstring of ``scope`` as Markdown in Google's style."""
    text = EXAMPLE.sub(r"\1Examples:", text)
    text = INDENTED.sub(r"\1\n\n", text)
    return ROLE.sub(lambda role: link(role[1], scope), text)


def link(name: str, scope: griffe.Object) -> str:
    """``name`` as code, linked if its page exists: not every module has one."""
    return f'<autoref identifier="{full(name, scope)}" optional><code>{name}</code></autoref>'


def full(name: str, scope: griffe.Object) -> str:
    """The whole path of a name that a docstring of ``scope`` may write short."""
    if name.startswith(f"{scope.package.name}."):
        return name
    head, *rest = name.split(".")
    try:
        return ".".join([scope.resolve(head), *rest])
    except griffe.NameResolutionError:
        return name


def fields(config: griffe.Class) -> str:
    """A config's own fields with their types and defaults, as a block of code."""
    own = [
        f"{name}: {field.annotation} = {field.value}"
        for name, field in config.attributes.items()
        if field.annotation is not None and "ClassVar" not in str(field.annotation)
    ]
    return "\n\n```python\n" + "\n".join(own) + "\n```" if own else ""
