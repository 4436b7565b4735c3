"""HTML elements whose text is escaped unless it was built here.

Why: a report shows what users and data sets bring (paths, reasons, row contents), and must not run any of it. A string
is escaped by its type, so forgetting is impossible rather than unlikely. Trade-off: a page in Python calls reads less
like HTML. Alternative: a template library, one more dependency for one page.
"""

from html import escape


class Markup(str):
    """Text that is HTML already."""


def join(*parts: str) -> Markup:
    """The parts one after another, plain strings escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def tag(element: str, *children: str, **attributes: str) -> Markup:
    """``<element attributes>children</element>``; ``class_`` is ``class``, ``aria_label`` is ``aria-label``."""
    named = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{element}{named}>{join(*children)}</{element}>")
