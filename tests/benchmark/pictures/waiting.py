"""The pictures of passes that wait for known reasons, and the quotes of what the diagnosis said of them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import textwrap
from typing import Any

from tests.benchmark.loaders import environment
from tests.support.waits import CAUSES, run
from tests.support.zygote import Zygote

from .svg import BLUE, ORANGE, RED, VIOLET, Picture, Scale

# One for each bound but `unclear`: the last one of a bound is quoted.
NAMES = (
    "none", "start: worker_init_fn", "workers, sleeping", "workers, waiting for a CPU", "workers", "node: worker",
    "node: node", "network", "trainer: sampler", "trainer: receiving", "setting: max_in_flight_bytes",
)  # fmt: skip

PARTS = {"workers": BLUE, "network": ORANGE, "receiving": RED, "window": VIOLET}
_ROW = 34


def record() -> dict[str, Any]:
    """What the diagnosis has said of each pass."""
    found = {}
    with environment() as (folder, env), contextlib.ExitStack() as stack:
        os.environ["RPCDATALOADER_TOKEN_FILE"] = env["RPCDATALOADER_TOKEN_FILE"]
        zygote = stack.enter_context(contextlib.closing(Zygote(folder)))
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


def draw_capacities(found: dict[str, Any]) -> Picture:
    """A row for each pass: what each part could do, and what the loop would take."""
    rates = [rate for one in found.values() for rate in (one["demand"], *one["capacities"].values())]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    bottom = 44 + _ROW * len(found)
    text = "For each pass, the capacity of each part in batches per second, and the demand of the loop."
    picture = Picture("Capacities against demand", text, 720, bottom + 34)
    picture.legend(12, 28, PARTS)
    picture.text(400, 28, "|  what the loop would take")
    scale = Scale(10.0**low, 10.0**high, 200, 680, is_log=True)
    for value in scale.powers():
        picture.line([(scale.at(value), 40), (scale.at(value), bottom)], "grid")
        picture.text(scale.at(value), bottom + 20, f"{value:,g}", "middle", "soft")
    picture.text(12, bottom + 20, "batches/s", look="soft")
    for row, (name, one) in enumerate(found.items()):
        y, x = 60.0 + row * _ROW, scale.at(one["demand"])
        picture.text(12, y + 5, name)
        picture.line([(x, y - 12), (x, y + 12)], "wire", 'stroke-width="3"')
        for part, colour in PARTS.items():
            if (rate := one["capacities"].get(part)) is not None:
                # A ring, for what is behind it: a full pipeline has what the window allows in flight.
                look = f'fill="none" stroke="{colour}" stroke-width="3"' if part == "window" else f'fill="{colour}"'
                picture.add(f'<circle cx="{scale.at(rate):.1f}" cy="{y:.1f}" r="6" {look}/>')
    return picture
