"""From the command line to a question to a report; nothing else."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence

# Before torch and numpy are imported below, as in a node server: their threads are none of the dataset's.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

from rpcdataloader.check.examine import Question, examine  # noqa: E402
from rpcdataloader.check.report import Finding, Report, Stop  # noqa: E402


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
        metavar="MODULE:FACTORY",
        help="a class or function without required arguments that makes the dataset, or a dataset; MODULE is imported, "
        "from the current folder too",
    )
    parser.add_argument(
        "--workers",
        metavar="ADDRESS,...",
        help="node servers to ask, each of them (default: a pool of its own on this machine)",
    )
    parser.add_argument(
        "--collate-fn", metavar="MODULE:FUNCTION", help="makes a batch of a list of samples (default: torch's)"
    )
    parser.add_argument(
        "--samples",
        dest="num_samples",
        type=int,
        default=Question.num_samples,
        metavar="N",
        help="measure at most so many samples (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=Question.seconds,
        metavar="SECONDS",
        help="measure for about so many seconds at most (default: %(default)s)",
    )
    parser.add_argument(
        "--rate", type=float, metavar="R", help="samples per second that the trainer wants (default: not known)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines (default: off)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a dataset; returns the exit status: 0 if all is well, 1 if not, 2 for wrong arguments."""
    parser = make_parser()
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    try:
        question = Question(**options)
    except ValueError as exc:
        parser.error(str(exc))
    report = Report(show=_hide if as_json else _print)
    # What the dataset prints is not for scripts.
    output = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with output, contextlib.suppress(Stop):
        examine(question, report)
    if as_json:
        print(json.dumps({"dataset": question.dataset, **report.as_data()}, indent=2))
    elif report.failed:
        print(f"{question.dataset} does not work as it is: {', '.join(report.failed)}")
    else:
        print(f"{question.dataset} works remotely")
    return 1 if report.failed else 0


def _print(finding: Finding) -> None:
    print(*finding.lines(), sep="\n", flush=True)


def _hide(_finding: Finding) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
