"""The pictures of passes that wait for known reasons, and the quotes of what the diagnosis said of them.

The pictures are part of ``docs/waiting.md``; lines and letters have their colour,
light or dark.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.waits import CAUSES, run
from tests.support.zygote import Zygote

# One for each bound but `unclear`: the last one of a bound is quoted.
NAMES = (
    "none", "start: worker_init_fn", "workers, sleeping", "workers, waiting for a CPU", "workers", "node: worker",
    "node: node", "network", "trainer: sampler", "trainer: receiving", "setting: max_in_flight_bytes",
)  # fmt: skip

PARTS = {"workers": "#4285f4", "network": "#f2711c", "receiving": "#d93025", "window": "#c58af9"}
_WIDTH, _LEFT, _RIGHT, _ROW = 720, 200, 640, 34


@contextlib.contextmanager
def forking() -> Iterator[Zygote]:
    """A process that node servers are forked from."""
    with tempfile.TemporaryDirectory(prefix="rpcdl-waiting-") as name:
        token = Path(name) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        os.environ["RPCDATALOADER_TOKEN_FILE"] = str(token)
        with contextlib.closing(Zygote(Path(name))) as zygote:
            yield zygote


def record() -> dict[str, Any]:
    """What the diagnosis has said of each pass."""
    found = {}
    with forking() as zygote:
        for name in NAMES:
            with CAUSES[name].pool(zygote) as addresses:
                diagnosis, _loader = run(CAUSES[name], addresses)
            numbers = diagnosis.metrics()
            found[name] = {
                "bound": diagnosis.bound,
                "part": diagnosis.part,
                "text": diagnosis.text,
                "wait_share": diagnosis.wait_share,
                "demand": numbers["demand_rate"],
                "capacities": {part: rate for part in PARTS if (rate := numbers.get(f"{part}_rate"))},
            }
    return found


def put_quotes(page: str, found: dict[str, Any]) -> str:
    """Return the page with what was said last of each bound as the quote of its section.

    Raises:
        ValueError: The page has no such section, or one without a quote.
    """
    for one in found.values():
        lines = textwrap.wrap(one["text"], 118, break_long_words=False, break_on_hyphens=False)
        quote = "".join(f"> {line}\n" for line in lines)
        section = rf"^### `{one['bound']}`\n(?:(?![#>]).*\n)*((?:>.*\n)+)"
        place = re.search(section, page, re.MULTILINE)
        if place is None:
            raise ValueError(f"the page has no section with a quote for the bound {one['bound']}")
        page = page[: place.start(1)] + quote + page[place.end(1) :]
    return page


def write(name: str, title: str, text: str, height: int, lines: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-text"\n     style="max-width: {_WIDTH}px; width: 100%; height: auto" '
        'font-family="sans-serif" font-size="13" fill="currentColor">'
    )
    about = [f'<title id="{name}-title">{title}</title>', f'<desc id="{name}-text">{text}</desc>']
    return "\n".join([head, *about, *lines, "</svg>\n"])


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def legend(colours: dict[str, str], y: float) -> list[str]:
    lines, x = [], 8.0
    for name, colour in colours.items():
        lines += [
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="11" height="11" fill="{colour}"/>',
            label(x + 15, y, name),
        ]
        x += 26 + 7 * len(name)
    return lines


def draw_capacities(found: dict[str, Any]) -> str:
    """A row for each pass: what each part could do, and what the loop would take."""
    rates = [rate for one in found.values() for rate in (one["demand"], *one["capacities"].values())]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))

    def at(rate: float) -> float:
        return _LEFT + (math.log10(rate) - low) / (high - low) * (_WIDTH - 40 - _LEFT)

    bottom = 44 + _ROW * len(found)
    lines = [*legend(PARTS, 20), label(330, 20, "|  what the loop would take")]
    for power in range(low, high + 1):
        x = at(10.0**power)
        lines.append(f'<path d="M{x:.1f} 36 V{bottom}" stroke="currentColor" opacity="0.2"/>')
        lines.append(label(x, bottom + 16, f"{10**power:,}" if power >= 0 else f"{10.0**power:g}", "middle"))
    lines.append(label(8, bottom + 16, "batches/s"))
    for row, (name, one) in enumerate(found.items()):
        y, x = 56.0 + row * _ROW, at(one["demand"])
        lines += [
            label(8, y + 4, name),
            f'<path d="M{x:.1f} {y - 12} v24" stroke="currentColor" stroke-width="3"/>',
        ]
        for part, colour in PARTS.items():
            if (rate := one["capacities"].get(part)) is not None:
                shown = f"<title>{part}: {rate:,.0f} batches per second</title>"
                # A ring, for what is behind it: a full pipeline has what the window allows in flight.
                look = f'fill="none" stroke="{colour}" stroke-width="3"' if part == "window" else f'fill="{colour}"'
                lines.append(f'<circle cx="{at(rate):.1f}" cy="{y:.1f}" r="6" {look}>{shown}</circle>')
    text = "For each pass, the capacity of each part in batches per second, and the demand of the loop."
    return write("waiting-capacities", "Capacities against demand", text, bottom + 24, lines)
