"""``make figures``: draw the pictures of the documents, and write numbers and quotes into them, from recorded data.

::

    python -m tests.benchmark.pictures                    # draw everything; the same data give the same bytes
    python -m tests.benchmark.pictures --record losses    # run it first: waiting, losses, terminal, page, or all

The data are the JSON files and tables in ``docs/figures``, and ``tests/benchmark/recorded.json``. The pictures without
data, ``overview.svg`` and ``processes.svg``, are edited as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmark.processes import stop_by_signals

from . import losses, numbers, page, results, terminal, waiting

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "figures"

RECORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "waiting": waiting.record,
    "losses": losses.record,
    "terminal": terminal.record,
}


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def draw() -> dict[Path, str]:
    """Return what belongs into which file."""
    lost, waits = _read("losses"), _read("waiting")
    pictures = {
        "killed": losses.draw_killed(lost["killed"]).render(),
        "terminal": terminal.draw_terminal(_read("terminal")).render(),
        "loaders": results.draw_loaders().render(),
        "one-machine": results.draw_one_machine().render(),
        "workers": results.draw_workers().render(),
        "cost": results.draw_cost().render(),
        "startup": results.draw_startup().render(),
        "memory": results.draw_memory().render(),
        "waiting-capacities": waiting.draw_capacities(waits).render(),
    }
    readme, page = ROOT / "README.md", ROOT / "docs" / "waiting.md"
    return {
        **{FOLDER / f"{name}.svg": text for name, text in pictures.items()},
        readme: numbers.put_numbers(readme.read_text(), numbers.make_numbers(lost)),
        page: waiting.put_quotes(page.read_text(), waits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--record",
        nargs="?",
        choices=[*RECORDERS, "page"],
        const="",
        help="run and record this first, or all; about a minute each on a quiet machine; terminal and page take root, "
        "and page chromium",
    )
    args = parser.parse_args()
    if args.record is not None:
        stop_by_signals()
        for name in [args.record] if args.record else [*RECORDERS, "page"]:
            if name == "page":
                page.record(FOLDER / "live-page.png")
                continue
            text = json.dumps(RECORDERS[name](), indent=1, ensure_ascii=False)
            (FOLDER / f"{name}.json").write_text(text + "\n")
    for path, text in draw().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
