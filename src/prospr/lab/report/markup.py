"""HTML and SVG from Python: text is escaped unless it is markup already."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

VOID = frozenset({"meta", "br", "hr", "link", "img", "input"})


class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `class_` and `aria_label` become `class` and `aria-label`; attributes that are None are left out.

    >>> tag("td", "a < b", class_="number")
    '<td class="number">a &lt; b</td>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening if name in VOID else f"{opening}{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Children one after the other, each escaped unless it is markup.

    >>> join("a & ", tag("b", "c"))
    'a &amp; <b>c</b>'
    """
    return Markup("".join(child if isinstance(child, Markup) else escape(str(child)) for child in children))


@dataclass(frozen=True)
class Place:
    """Where sections stand on the page: the level of their headings, and what their ids begin with."""

    level: int = 2
    prefix: str = ""

    def section(self, heading: str, name: str, *children: Markup) -> Markup:
        """
        >>> Place(3, "one-").section("Time", "time")
        '<section aria-labelledby="one-time"><h3 id="one-time">Time</h3></section>'
        """
        name = self.prefix + name
        return tag("section", tag(f"h{self.level}", heading, id=name), *children, aria_labelledby=name)
