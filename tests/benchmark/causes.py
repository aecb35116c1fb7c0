"""Is the diagnosis right? Passes that wait for a known reason, many times, with consumers of three speeds.

``python -m tests.benchmark.causes`` prints two Markdown tables: how often the verdict was the cause, and how often as
many more workers as were recommended ended the waiting. With ``--runs 20`` it takes an hour. As root, it also shapes a
link.
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
from typing import Any

from tests.benchmark.table import format_table
from tests.integration.network import why_not
from tests.integration.waits import CAUSES, POOLS, Cause, one_node, run
from tests.integration.zygote import Zygote

SPEEDS = (0.5, 1.0, 2.0)


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
    """A row of the first table: for each speed of the consumer, how many verdicts were right; and the others."""
    cells, others = [], Counter[str]()
    with cause.pool(zygote) as addresses:
        for speed in SPEEDS:
            found = [run(cause, addresses, speed)[0] for _ in range(num_runs)]
            right = [diagnosis for diagnosis in found if diagnosis.bound in cause.bounds]
            others.update(diagnosis.bound for diagnosis in found if diagnosis.bound not in cause.bounds)
            shares = sorted({round(100 * diagnosis.wait_share) for diagnosis in found})
            cells.append(f"{len(right)}/{num_runs}: {'-'.join(map(str, shares[:1] + shares[1:][-1:]))} %")
    wrong = ", ".join(f"{bound}: {count}" for bound, count in others.items())
    return [name, *cells, wrong or "-"]


def count_enough(cause: Cause, num_runs: int, zygote: Zygote) -> list[str]:
    """A row of the second table: what was recommended, and what that, and less than that, made of the waiting."""
    now = cause.options["num_workers"]
    recommended, enough, too_few = Counter[Any](), 0, 0

    def wait_with(num_workers: int) -> float:
        other = cause._replace(options={**cause.options, "num_workers": num_workers}, num_batches=300)
        return run(other, addresses)[0].wait_share

    with one_node(zygote) as addresses:
        for _ in range(num_runs):
            more = run(cause, addresses)[0].more_workers
            recommended[more] += 1
            if more is not None:
                enough += wait_with(now + more[1]) < 0.05
                too_few += wait_with(now + 2 * more[0] // 3) >= 0.05
    usual = recommended.most_common(1)[0][0]
    text = "none" if usual is None else f"{usual[1]} ({usual[0]} to {usual[2]})"
    return [str(now), text, f"{enough}/{num_runs}", f"{too_few}/{num_runs}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.causes", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="passes of each cause and speed (default: %(default)s)")
    parser.add_argument("--only", help="names of causes that contain this text")
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
                rows.append([name, *["-"] * len(SPEEDS), "skipped: this needs root and network namespaces"])
                continue
            rows.append(count_verdicts(name, cause, args.runs, zygote))
            print(rows[-1], flush=True)
        header = ["cause", *(f"consumer x {speed:g}" for speed in SPEEDS), "other verdicts"]
        print("\nVerdicts that name the cause, and how much of its time the loop waited:\n")
        print(format_table(header, rows, 1))
        if args.only is None or args.only in "more workers":
            header = [
                "workers",
                "more are recommended",
                "with the likely number below 5 %",
                "with 2/3 of the least not",
            ]
            rows = [count_enough(cause, args.runs, zygote) for cause in POOLS]
            print(f"\nWhat more workers do:\n\n{format_table(header, rows, 2)}")
    load = os.getloadavg()[0]
    print(f"\n{args.runs} runs each, {len(os.sched_getaffinity(0))} CPUs, load average {load:.1f} at the end.")


if __name__ == "__main__":
    main()
