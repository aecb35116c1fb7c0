"""``make lint``: words that are mostly a sign of a sentence to read twice, each with what to write instead.

::

    python -m tests.prose                    # package and documents, with their figures
    python -m tests.prose docs/workers.md    # the hits in these files

Comments and strings of Python files are read, and Markdown without its code. A single hit may be good English; more
than a few per 10,000 words are a habit.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = {
    "package": ["rpcdataloader/**/*.py"],
    "documents": ["README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "slurm/*.md"],
}
MOST_PER_10000 = 5.0

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
_PATTERNS = [(re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), re.I), remedy) for words, remedy in INSTEAD.items()]

# Words that an entry under Args or Attributes begins with when the noun that it describes is missing.
_NOUNLESS = (
    "After|Also|As|Asked|At|Before|Between|But|By|Called|For|From|If|In|It|Made|Nor|Not|Of|On|Out|Over|So|Something|"
    "Such|Taken|That|They|To|Told|Under|Until|When|Where|Whether|Which|While|Who|Whose|With|Without"
)
_SECTION = re.compile(r" *(\w[\w ]*):\s*")
_ENTRY_WITHOUT_NOUN = re.compile(rf" {{4}}[*\w`., /]+(?: \([^)]*\))?:\s+(?:{_NOUNLESS})\b")

_CODE_OF_MARKDOWN = re.compile(r"^( *)(```|~~~).*?^\1\2|<!--.*?-->|`+[^`\n]+`+|\]\([^)]*\)", re.M | re.S)
_CODE_OF_STRING = re.compile(r"`+[^`\n]+`+|\{[^{}\n]*\}")
_WORD = re.compile(r"[^\W\d_][\w'-]*")


@dataclass(frozen=True, slots=True)
class Hit:
    """A place to write anew.

    Attributes:
        line: Number of the line, from 1.
        words: Words that were found.
        remedy: Advice on what to write instead.
        is_entry: True for an entry that begins without its noun.
    """

    line: int
    words: str
    remedy: str
    is_entry: bool = False


def _blank(match: re.Match[str]) -> str:
    """Spaces and line feeds in place of the match, so that lines keep their numbers."""
    return re.sub(r"\S", " ", match[0])


def _prose_of_python(source: str) -> str:
    """Return comments and strings on the lines where they are."""
    lines = [""] * (source.count("\n") + 2)
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            text = re.sub(r"^(#+ ?|[A-Za-z]{0,2}(\"\"\"|'''|\"|'))", "", token.string)
            for number, line in enumerate(text.split("\n"), token.start[0]):
                lines[number] += f" {line}"
    return _CODE_OF_STRING.sub(_blank, "\n".join(lines[1:]))


def _find_entries(source: str) -> Iterator[Hit]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        docstring = ast.get_docstring(node, clean=True)
        if docstring is None:
            continue
        section = ""
        for number, line in enumerate(docstring.split("\n"), node.body[0].lineno):
            if heading := _SECTION.fullmatch(line):
                section = heading[1]
            if section in ("Args", "Attributes") and _ENTRY_WITHOUT_NOUN.match(line):
                yield Hit(number, line.strip(), "begin the entry with the noun that is described", True)


def examine(text: str, is_python: bool) -> tuple[int, list[Hit]]:
    """Return the number of words of a file's prose, and the hits in the order of their lines."""
    prose = _prose_of_python(text) if is_python else _CODE_OF_MARKDOWN.sub(_blank, text)
    matches = [(match, remedy) for pattern, remedy in _PATTERNS for match in pattern.finditer(prose)]
    hits = list(_find_entries(text)) if is_python else []
    for match, remedy in sorted(matches, key=lambda found: found[0].start()):
        hits.append(Hit(prose.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), remedy))
    return len(_WORD.findall(prose)), sorted(hits, key=lambda hit: hit.line)


def find_files(patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern) if "_build" not in path.parts})


def report(name: str, paths: Iterable[Path], most: float = MOST_PER_10000) -> bool:
    """Print the hits in these files and their figures.

    Returns:
        True if there are no more hits than that per 10,000 words, and no entry begins without its noun.
    """
    num_words = num_hits = num_entries = 0
    for path in paths:
        words, hits = examine(path.read_text(), path.suffix == ".py")
        num_words += words
        num_entries += sum(hit.is_entry for hit in hits)
        num_hits += sum(not hit.is_entry for hit in hits)
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        for hit in hits:
            print(f"{shown}:{hit.line}: {hit.words!r}: {hit.remedy}")
    rate = num_hits / max(num_words, 1) * 10_000
    print(f"{name}: {num_hits} hits in {num_words:,} words: {rate:.1f} per 10,000, and at most {most:g} are allowed")
    print(f"{name}: {num_entries} entries begin without their noun, and none may")
    return rate <= most and num_entries == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.prose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="files to read (default: package and documents)")
    files = [path.resolve() for path in parser.parse_args().files]
    texts = {"these files": files} if files else {name: find_files(globs) for name, globs in TEXTS.items()}
    results = [report(name, paths) for name, paths in texts.items()]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
