"""``rpcdataloader COMMAND``, or ``python -m rpcdataloader COMMAND``: finds the command and runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from rpcdataloader import __version__
from rpcdataloader.host.trust import search_current_folder

# Module and purpose of each; a module is imported when its command runs, since some must work without torch.
COMMANDS = {
    "launch": ("rpcdataloader.launch", "run a node server on this machine"),
    "status": ("rpcdataloader.status.__main__", "show what node servers are doing"),
    "check": ("rpcdataloader.check.__main__", "find out whether a dataset works in remote workers, and how fast"),
    "ssh": ("rpcdataloader.ssh", "run a node server on each host of a file"),
}


def make_parser() -> argparse.ArgumentParser:
    """The command line up to the command."""
    commands = [f"  {name:<8} {purpose}" for name, (_module, purpose) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="rpcdataloader",
        description="Load training data in worker processes on other machines.",
        epilog="\n".join(["commands:", *commands, "", "rpcdataloader COMMAND --help lists the options of a command."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rpcdataloader {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="one of the commands below")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    module, _purpose = COMMANDS[make_parser().parse_args(words[:1]).command]
    search_current_folder()  # for modules to preload and to check
    status: int = importlib.import_module(module).main(words[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
