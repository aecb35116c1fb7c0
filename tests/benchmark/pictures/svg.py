"""Pictures with a background of their own, legible on light and on dark pages, and charts on them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

BLUE, GREY, ORANGE, VIOLET, GREEN, RED = "#3b7de0", "#8b949e", "#d9780a", "#9a66ee", "#2b9348", "#e5534b"

_STYLE = """<style>
.card { fill: #ffffff; stroke: #d1d9e0 } .box { fill: #f6f8fa; stroke: #818b98 } .grid { stroke: #d1d9e0; fill: none }
.ink { fill: #1f2328 } .soft { fill: #59636e } .wire { stroke: #59636e; fill: none } .tip { fill: #59636e }
.code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #3d444d } .box { fill: #212830; stroke: #656c76 } .grid { stroke: #3d444d }
.ink { fill: #f0f6fc } .soft { fill: #a8b1bb } .wire { stroke: #a8b1bb } .tip { fill: #a8b1bb }
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

    def text(self, x: float, y: float, words: str, anchor: str = "start", look: str = "ink", more: str = "") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}"'
        self.add(f'<text class="{look}" {place} text-anchor="{anchor}"{more and " " + more}>{escape(words)}</text>')

    def bar(self, x: float, y: float, width: float, height: float, colour: str, shown: str) -> None:
        size = f'width="{max(width, 1.0):.1f}" height="{height:.1f}"'
        title = f"<title>{escape(shown)}</title>"
        self.add(f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="2" fill="{colour}">{title}</rect>')

    def line(self, points: Sequence[tuple[float, float]], look: str = "", more: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<polyline class="{look}" points="{path}"{more and " " + more}/>')

    def legend(self, x: float, y: float, colours: Mapping[str, str]) -> None:
        for name, colour in colours.items():
            self.bar(x, y - 11, 12, 12, colour, name)
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

    def powers(self) -> Iterator[float]:
        """The powers of ten on a logarithmic scale."""
        for power in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1):
            yield 10.0**power


def format_tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Bars:
    """Rows of bars in groups, on a logarithmic scale.

    Attributes:
        groups: Bars by the title of their group: label, value and what stands behind the bar.
        colours: Colour of each label.
        low: Lowest value of the scale.
        high: Highest value of the scale.
        base: Value at which bars begin.
        unit: Unit of the scale, or what its values are.
    """

    groups: Mapping[str, Sequence[tuple[str, float, str]]]
    colours: Mapping[str, str]
    low: float
    high: float
    base: float
    unit: str

    def draw(self, title: str, text: str) -> Picture:
        left, width, row, gap = 164, 600, 22, 34
        num_rows = sum(map(len, self.groups.values()))
        bottom = 48 + gap * len(self.groups) + row * num_rows
        picture = Picture(title, text, width, bottom + 34)
        picture.text(12, 28, title, more='font-weight="600"')
        scale = Scale(self.low, self.high, left, width - 110, is_log=True)
        for value in scale.powers():
            picture.text(scale.at(value), bottom + 20, format_tick(value), "middle", "soft")
        picture.text(12, bottom + 20, self.unit, look="soft")
        y = 44.0
        for group, bars in self.groups.items():
            picture.text(12, y + 22, group, look="soft", more='font-style="italic"')
            y += gap
            for value in scale.powers():
                look = "wire" if value == self.base else "grid"
                picture.line([(scale.at(value), y - 4), (scale.at(value), y + row * len(bars))], look)
            for label, value, shown in bars:
                start, end = sorted((scale.at(self.base), scale.at(value)))
                picture.text(left - 8, y + 13, label, "end")
                picture.bar(start, y, end - start, 16, self.colours[label], shown)
                picture.text(end + 6, y + 13, shown, more='font-size="13"')
                y += row
        return picture


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart.

    Attributes:
        label: Name in the legend.
        colour: Colour of line and dots.
        points: Pairs of values.
        more: Further attributes of the line.
        has_dots: True to show each point.
    """

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    more: str = ""
    has_dots: bool = True


def draw_lines(
    title: str,
    text: str,
    series: Sequence[Series],
    x: Scale,
    y: Scale,
    units: tuple[str, str],
    x_ticks: Sequence[float],
) -> Picture:
    """Return a chart of lines, with the legend under its title.

    Args:
        title: Title of the chart.
        text: Description.
        series: Lines.
        x: Scale from left to right, in pixels of a card of 600.
        y: Scale from the bottom to the top; the bottom is its ``start``.
        units: Units of x and y.
        x_ticks: Values of x that are named.
    """
    picture = Picture(title, text, 600, int(y.start) + 52)
    picture.text(12, 28, title, more='font-weight="600"')
    picture.legend(12, 54, {one.label: one.colour for one in series})
    picture.text(12, y.end - 8, units[1], look="soft")
    for value in y.powers() if y.is_log else ticks(y.high):
        picture.line([(x.start, y.at(value)), (x.end, y.at(value))], "grid")
        picture.text(x.start - 8, y.at(value) + 5, format_tick(value), "end", "soft")
    for value in x_ticks:
        picture.text(x.at(value), y.start + 20, format_tick(value), "middle", "soft")
    picture.text((x.start + x.end) / 2, y.start + 42, units[0], "middle", "soft")
    for one in series:
        points = [(x.at(a), y.at(b)) for a, b in one.points]
        picture.line(points, more=f'fill="none" stroke="{one.colour}" stroke-width="2.5" {one.more}'.rstrip())
        if one.has_dots:
            for (a, b), (at_x, at_y) in zip(one.points, points, strict=True):
                shown = f"<title>{format_tick(a)}: {b:,.4g}</title>"
                picture.add(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3.5" fill="{one.colour}">{shown}</circle>')
    return picture


def ticks(high: float) -> list[float]:
    """Return up to six round values from 0 to ``high``."""
    step = 10.0 ** math.floor(math.log10(high))
    step = next(step * part for part in (0.2, 0.5, 1, 2) if high / (step * part) <= 5.5)
    return [step * number for number in range(int(high / step) + 1)]
