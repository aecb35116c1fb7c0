"""Is the diagnosis right? Passes that wait for a known reason, many times, with consumers of three speeds.

``python -m tests.benchmark.causes`` prints two Markdown tables: for each cause how long the loop waited, with any other
verdicts, and how often as many more workers as were recommended ended the waiting. With ``--runs 20`` it takes an hour.
As root, it also shapes a link.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.benchmark.table import format_table
from tests.integration.network import why_not
from tests.integration.waits import CAUSES, POOLS, Cause, run, take_advice
from tests.integration.zygote import Zygote

SPEEDS = (0.5, 1.0, 2.0)
HEADER = ["cause", *(f"consumer x {speed:g}" for speed in SPEEDS)]
HEADER_OF_POOLS = ["pool", "more are recommended", "with the likely number below 5 %", "with 2/3 of the least not"]


@contextlib.contextmanager
def forking() -> Iterator[Zygote]:
    """A process that node servers are forked from."""
    with tempfile.TemporaryDirectory(prefix="rpcdl-causes-") as name:
        token = Path(name) / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_urlsafe(32))
        os.environ["RPCDATALOADER_TOKEN_FILE"] = str(token)
        with contextlib.closing(Zygote(Path(name))) as zygote:
            yield zygote


def count_verdicts(name: str, cause: Cause, num_runs: int, zygote: Zygote) -> list[str]:
    """A row of the first table: for each speed of the consumer, how long the loop waited, and the wrong verdicts."""
    cells = []
    with cause.pool(zygote) as addresses:
        for speed in SPEEDS:
            found = [run(cause, addresses, speed)[0] for _ in range(num_runs)]
            verdicts = Counter(f"{diagnosis.bound} {diagnosis.part}".strip() for diagnosis in found)
            wrong = {verdict: count for verdict, count in verdicts.items() if verdict != cause.bound}
            shares = sorted({round(100 * diagnosis.wait_share) for diagnosis in found})
            others = "".join(f", wrong: {count} {bound}" for bound, count in wrong.items())
            cells.append(f"{'-'.join(map(str, shares[:1] + shares[1:][-1:]))} %{others}")
    return [name, *cells]


def count_enough(name: str, cause: Cause, num_runs: int, zygote: Zygote) -> list[str]:
    """A row of the second table: what was recommended, and what that, and less than that, made of the waiting."""
    with cause.pool(zygote) as addresses:
        found = [take_advice(cause, addresses) for _ in range(num_runs)]
    usual = Counter(advice.more for advice in found).most_common(1)[0][0]
    text = "none" if usual is None else f"{usual[1]} ({usual[0]} to {usual[2]})"
    enough, too_few = sum(advice.is_enough for advice in found), sum(advice.fewer_are_too_few for advice in found)
    return [name, text, f"{enough}/{num_runs}", f"{too_few}/{num_runs}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.causes", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="passes of each cause and speed (default: %(default)s)")
    parser.add_argument("--only", help="names of causes and pools that contain this text")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error("--runs must be positive")
    reason = why_not()
    with forking() as zygote:
        rows = []
        for name, cause in CAUSES.items():
            if args.only is not None and args.only not in name:
                continue
            if reason and "1 Gb/s" in name:
                rows.append([name, *["-"] * len(SPEEDS)])
                continue
            rows.append(count_verdicts(name, cause, args.runs, zygote))
            print(rows[-1], flush=True)
        if rows:
            print(f"\nHow much of its time the loop waited:\n\n{format_table(HEADER, rows, 1)}")
        rows = [
            count_enough(name, cause, args.runs, zygote)
            for name, cause in POOLS.items()
            if args.only is None or args.only in name
        ]
        if rows:
            print(f"\nWhat more workers do:\n\n{format_table(HEADER_OF_POOLS, rows, 2)}")
    load = os.getloadavg()[0]
    print(f"\n{args.runs} runs each, {len(os.sched_getaffinity(0))} CPUs, load average {load:.1f} at the end.")


if __name__ == "__main__":
    main()
