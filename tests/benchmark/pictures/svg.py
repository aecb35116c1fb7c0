"""Pictures with a background of their own, legible on light and on dark pages. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

BLUE, GREY, ORANGE, VIOLET, GREEN, RED = "#3b7de0", "#8b949e", "#d9780a", "#9a66ee", "#2b9348", "#e5534b"

_STYLE = """<style>
.card { fill: #ffffff; stroke: #d1d9e0 } .grid { stroke: #d1d9e0; fill: none }
.ink { fill: #1f2328 } .soft { fill: #59636e } .wire { stroke: #59636e; fill: none }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #3d444d } .grid { stroke: #3d444d }
.ink { fill: #f0f6fc } .soft { fill: #a8b1bb } .wire { stroke: #a8b1bb }
}
</style>"""


class Picture:
    """A card with text and shapes on it.

    Args:
        title: One line that says what is shown, for readers that cannot see it.
        text: Description, for the same readers.
        width: Width of the card in pixels at full size.
        height: Height of the card.
    """

    def __init__(self, title: str, text: str, width: int, height: int) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(text)}</desc>",
            _STYLE,
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def add(self, line: str) -> None:
        self._lines.append(line)

    def text(self, x: float, y: float, words: str, anchor: str = "start", look: str = "ink") -> None:
        self.add(f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        size = f'width="{max(width, 1.0):.1f}" height="{height:.1f}"'
        self.add(f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" fill="{colour}"/>')

    def line(self, points: Sequence[tuple[float, float]], look: str = "", more: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<polyline class="{look}" points="{path}"{more and " " + more}/>')

    def legend(self, x: float, y: float, colours: Mapping[str, str]) -> None:
        for name, colour in colours.items():
            self.bar(x, y - 11, 12, 12, colour)
            self.text(x + 17, y, name)
            x += 40 + 7.2 * len(name)

    def render(self) -> str:
        return "\n".join([*self._lines, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels.

    Attributes:
        low: Value at ``start``.
        high: Value at ``end``.
        start: Pixel of the lowest value.
        end: Pixel of the highest value.
        is_log: True for a logarithmic scale.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log10(x) if self.is_log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def powers(self) -> list[float]:
        """The powers of ten on a logarithmic scale."""
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]
