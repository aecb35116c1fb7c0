"""``make figures``: draw the pictures of the documents, and write numbers and quotes into them, from recorded data.

::

    python -m tests.benchmark.pictures                    # draw everything; the same data give the same bytes
    python -m tests.benchmark.pictures --record losses    # run it first: waiting, losses, or both

The data are the JSON files and tables in ``docs/figures``, and ``tests/benchmark/recorded.json``. The pictures without
data, ``overview.svg`` and ``processes.svg``, are edited as they are; ``live-page.png`` is a screenshot.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.benchmark.processes import stop_by_signals

from . import losses, results, waiting

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "figures"

RECORDERS = {"waiting": waiting.record, "losses": losses.record}


def draw() -> dict[Path, str]:
    """Return what belongs into which file."""
    lost, waits = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("losses", "waiting"))
    readme, page = ROOT / "README.md", ROOT / "docs" / "waiting.md"
    return {
        FOLDER / "killed.svg": losses.draw_killed(lost["killed"]).render(),
        FOLDER / "loaders.svg": results.draw_loaders("loaders", "Batches per second", 0.3, 100).render(),
        FOLDER / "one-machine.svg": results.draw_loaders("one-machine", "On one machine: batches/s", 0.9, 10).render(),
        FOLDER / "waiting-capacities.svg": waiting.draw_capacities(waits).render(),
        readme: results.put_numbers(readme.read_text(), results.make_numbers(lost)),
        page: waiting.put_quotes(page.read_text(), waits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--record", nargs="*", choices=RECORDERS, help="run and record these first, or all: a minute each when quiet"
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where something differs")
    args = parser.parse_args()
    if args.record is not None:
        stop_by_signals()
        for name in args.record or RECORDERS:
            text = json.dumps(RECORDERS[name](), indent=1, ensure_ascii=False)
            (FOLDER / f"{name}.json").write_text(text + "\n")
    for path, text in draw().items():
        if path.read_text() != text:
            if args.check:
                parser.exit(1, f"{path.relative_to(ROOT)} differs from its data: run make figures\n")
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
