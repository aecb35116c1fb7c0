"""What was found, as lines of text and as data; and what speeds and sizes mean. Pure, but for the caller's ``show``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: Gbit/s of the links that people have.
LINKS = (1, 10, 25, 100)

Level = Literal["ok", "note", "FAILED"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        details: Lines below it.
    """

    name: str
    level: Level
    text: str
    details: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """What is printed."""
        return [f"{self.level:<7} {self.name:<9} {self.text}", *(f"{'':<18}{line}" for line in self.details)]


class Stop(Exception):
    """After a finding that leaves nothing more to ask."""


@dataclass(slots=True)
class Report:
    """Findings in their order.

    Attributes:
        show: Called with each.
        facts: Numbers, for scripts.
    """

    show: Callable[[Finding], None]
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def ok(self, name: str, text: str, **facts: Any) -> None:
        """Something works."""
        self._add(Finding(name, "ok", text), facts)

    def note(self, name: str, text: str, details: Sequence[str] = (), **facts: Any) -> None:
        """Something to know, which is no fault."""
        self._add(Finding(name, "note", text, tuple(details)), facts)

    def fail(self, name: str, text: str, details: Sequence[str] = (), **facts: Any) -> None:
        """Something does not work."""
        self._add(Finding(name, "FAILED", text, tuple(details)), facts)

    def stop(self, name: str, text: str, details: Sequence[str] = ()) -> Stop:
        """Something does not work, and nothing more can be asked; returns what to raise."""
        self.fail(name, text, details)
        return Stop()

    def _add(self, finding: Finding, facts: dict[str, Any]) -> None:
        self.findings.append(finding)
        self.facts.update(facts)
        self.show(finding)

    @property
    def failed(self) -> list[str]:
        """Names of what does not work, each once."""
        return list(dict.fromkeys(finding.name for finding in self.findings if finding.level == "FAILED"))

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": not self.failed, "findings": [asdict(finding) for finding in self.findings], **self.facts}


def workers_to_fill(gbit_per_second: float, bytes_per_second: float) -> int:
    """How many workers, each of which makes ``bytes_per_second``, fill a link."""
    return math.ceil(gbit_per_second * 1e9 / 8 / bytes_per_second)


def workers_to_feed(rate: float, samples_per_second: float) -> int:
    """How many workers, each of which makes ``samples_per_second``, feed a trainer that wants ``rate`` of them."""
    return math.ceil(rate / samples_per_second)


def in_digits(number: float) -> str:
    """Three digits at least, and no exponent: ``11,384``, ``0.0085``."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}" if number >= 1e-4 else "0"


def in_bytes(number: float) -> str:
    """``1.5 MB``: decimal units, three digits."""
    for unit in ("bytes", "kB", "MB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{in_digits(number)} GB"


def in_seconds(seconds: float) -> str:
    """``0.3 s``, ``12 ms``."""
    if seconds >= 0.05:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "less than 1 ms"
