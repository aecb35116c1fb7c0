"""The command line of ``check``, and its exit status."""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import sys
from collections.abc import Sequence

# Before torch and numpy are imported below, as in a node server: their threads are not the dataset's.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

from rpcdataloader.check.examine import Failure, examine  # noqa: E402
from rpcdataloader.client.discovery import Inline, Where, find_workers  # noqa: E402
from rpcdataloader.errors import RPCError  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m rpcdataloader.check",
        allow_abbrev=False,
        description="Does this dataset work in remote workers, are its samples reproducible there, and how many "
        "workers does it need?",
        epilog="Exit status: 0 if all is well, 1 if something does not work, 2 for a wrong command line.",
    )
    parser.add_argument(
        "dataset",
        type=_target,
        metavar="MODULE:FACTORY",
        help="class or function without required arguments that makes the dataset, or a dataset; MODULE is imported, "
        "also from the current folder",
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        metavar="ADDRESS,...",
        help="node servers to check, each of them (default: a pool of its own on this machine)",
    )
    parser.add_argument(
        "--rate", type=_rate, metavar="R", help="samples per second that the trainer needs (default: unknown)"
    )
    return parser


def _target(text: str) -> str:
    name = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    if text.partition(":")[0].endswith(".py") or not re.fullmatch(f"{name}:{name}", text):
        raise argparse.ArgumentTypeError(f"expected MODULE:NAME, such as mydata:make_dataset, got {text!r}")
    return text


def _workers(text: str) -> Where | None:
    try:
        where = find_workers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if isinstance(where, Inline):
        raise argparse.ArgumentTypeError("inline has no workers; leave it out for a pool on this machine")
    return where


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return rate


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a dataset; returns the exit status."""
    options = make_parser().parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    failed = []

    def report(level: str, name: str, text: str, details: Sequence[str] = ()) -> None:
        if level == "FAILED":
            failed.append(name)
        print(f"{level:<7} {name:<9} {text}", *(f"{'':<18}{line}" for line in details), sep="\n", flush=True)

    try:
        examine(options.dataset, options.workers, options.rate, report)
    except Failure as failure:
        report("FAILED", *failure.args)
    except RPCError as error:
        report("FAILED", "workers", str(error))
    except KeyboardInterrupt:
        return 130
    if failed:
        print(f"{options.dataset} does not work as it is: {', '.join(failed)}")
        return 1
    print(f"{options.dataset} works remotely")
    return 0


if __name__ == "__main__":
    # Prints the stack of a constructor that crashes in this process, too.
    faulthandler.enable()
    sys.exit(main())
