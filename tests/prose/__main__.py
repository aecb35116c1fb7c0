"""``make lint``: words that are mostly a sign of a sentence to read twice, each with what to write instead.

::

    python -m tests.prose                    # package and documents
    python -m tests.prose docs/workers.md    # these files

A single hit may be good English; more than a few per 10,000 words are a habit.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = ("rpcdataloader/**/*.py", "README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "slurm/*.md")
MOST_PER_10000 = 2.0

_ACTOR = "name the actor: client, worker, peer, caller, user"
INSTEAD = {
    r"nobody|no one|somebody|someone|anybody|anyone|everybody|everyone|whoever|whom": _ACTOR,
    r"one who|those who|who does not|who do not": _ACTOR,
    r"for ever|as ever": "without limit, permanently, as usual; or leave it out",
    r"so many|so much": "the number, or: that many, this number of",
    r"so long|so often": "the time, or: that long, every SECONDS",
    r"(?:is|are|was|were) (?-i:none)": "say what is: does not count, is missing, is no X",
    r"shall": "must, or the present tense",
    r"that (?:is|are) there|such a one|has no part": "say what is, with its noun",
    r"again and again": "repeatedly, every SECONDS",
    r"any more": "no longer; or say what happens now",
    r"(?:by|of) (?:itself|themselves)": "automatically; or name the actor",
    r"of late": "recent, recently",
    r"in vain": "without success",
    r"one pleases|you please": "any",
    r"to be had": "available",
}


def main() -> int:
    """Print the hits; returns 1 if there are too many."""
    paths = [Path(name) for name in sys.argv[1:]] or [path for glob in TEXTS for path in sorted(ROOT.glob(glob))]
    num_words = num_hits = 0
    for path in paths:
        text = path.read_text()
        num_words += len(text.split())
        for words, remedy in INSTEAD.items():
            for match in re.finditer(rf"\b(?:{words})\b".replace(" ", r"\s+"), text, re.IGNORECASE):
                num_hits += 1
                print(f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: {remedy}")
    rate = num_hits / num_words * 10_000
    print(f"{num_hits} hits in {num_words:,} words: {rate:.1f} per 10,000, and at most {MOST_PER_10000:g} are allowed")
    return int(rate > MOST_PER_10000)


if __name__ == "__main__":
    sys.exit(main())
