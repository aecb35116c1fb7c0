"""How many workers a loop wants, decided every few seconds while it runs. Pure.

The fewest workers whose capacity is the loop's demand are enough, with a margin that grows with the spread of the task
times: with equal rates, loop and workers would wait for each other. That margin is a guess. A loop that waits all the
same raises it, by one worker at a time, and forgets that slowly.

The number grows at once, and shrinks only if two decisions agree. It counts places in their order, the first ones
first: so nodes at the end have no workers, and can be given back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

# A decision needs this time and this number of batches since the last one: the mean of 32 steps whose times vary by
# 30 % is known to 5 %.
LEAST_SECONDS, LEAST_BATCHES = 5.0, 32

# Share of its time that a loop may wait; a loop that waits less needs no more workers, whatever is computed.
_HARMLESS = 0.05

# The loop's demand is averaged with this weight of the newest measurement, unless that differs by this share: then the
# loop is another one.
_SMOOTHING, _CHANGED = 0.3, 0.2

# Capacity that is enough, as a multiple of the demand, and how that grows with the square of the spread of task times:
# found in tests/simulation/test_demand.py. A loop may wait for some percent of its time.
_MARGIN, _MARGIN_BY_SPREAD = 0.98, 0.9

# Most that a waiting loop raises its margin by, and seconds in which it forgets half of that.
_MOST_RAISE, _HALF_LIFE = 1.5, 900.0

# The number does not shrink for less than this.
_SLACK = 1.06

# Batches per second of a loop that does nothing.
_MOST_NEEDED = 1e6

# A decision looks no further than this many times the workers at work.
_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured since the last decision.

    Attributes:
        needed: Batches per second of the loop if it never slept.
        allowed: Batches per second that all but the workers allow; infinite without a limit.
        waited: Share of its time that the loop slept, from 0 to 1.
        spread: Standard deviation of the task times, divided by their mean.
        rates: Batches per second of each worker at work, by its place.
    """

    needed: float
    allowed: float
    waited: float
    spread: float
    rates: Mapping[int, float]


class Demand:
    """The number of workers that one loop wants, from pass to pass.

    Args:
        least: Least number.

    Attributes:
        wanted: The latest decision, which may exceed what is offered; None before the first.
    """

    def __init__(self, least: int = 1) -> None:
        self.wanted: int | None = None
        self._least = max(1, least)
        self._rates: dict[int, float] = {}  # of every place that was ever measured
        self._needed = self._waited = 0.0
        self._was_same = False
        self._raise = 1.0  # factor of the margin, as of the time that follows
        self._raised_at = 0.0
        self._before = (0, 0)  # wanted workers and those at work at the last decision
        self._last_enough = sys.maxsize  # number computed by the last decision

    def decide(self, now: float, seen: Seen) -> int:
        """Return the number of workers that the loop wants from now on."""
        self._rates |= seen.rates
        num_workers = len(seen.rates)
        wanted = num_workers if self.wanted is None else self.wanted
        # Waiting in a time in which the workers were others says nothing about these.
        is_settled = self._before == (wanted, num_workers)
        needed = min(seen.needed, _MOST_NEEDED)
        is_same = is_settled and abs(needed - self._needed) <= _CHANGED * self._needed
        self._needed += (_SMOOTHING if is_same else 1.0) * (needed - self._needed)
        is_known = is_same and self._was_same
        self._waited += (_SMOOTHING if is_known else 1.0) * (seen.waited - self._waited)
        self._was_same = is_same
        goal = min(self._needed, seen.allowed)
        margin = _MARGIN + _MARGIN_BY_SPREAD * seen.spread**2
        if is_known and self._waited >= _HARMLESS and needed <= seen.allowed:
            # The present capacity is not enough, by however little.
            self._raise = min(_MOST_RAISE, max(self._raised(now), 1.01 * sum(seen.rates.values()) / (goal * margin)))
            self._raised_at = now
        margin *= self._raised(now)
        most = max(_GROWTH * num_workers, self._least)
        enough = min(max(self._least, self._count(goal * margin)), most)
        if enough > wanted:
            # That more workers are at work than it wants explains why it does not wait.
            if self._waited >= _HARMLESS or num_workers > wanted:
                wanted = enough
        elif self._count(goal * margin * _SLACK) < wanted:
            wanted = min(wanted, max(enough, self._last_enough))
        self._before, self._last_enough, self.wanted = (wanted, num_workers), enough, wanted
        return wanted

    def _raised(self, now: float) -> float:
        """The present factor of the margin."""
        return 1.0 + (self._raise - 1.0) * math.pow(0.5, (now - self._raised_at) / _HALF_LIFE)

    def _count(self, rate: float) -> int:
        """The number of places whose workers together reach a rate; those not measured are as fast as the average."""
        usual = sum(self._rates.values()) / len(self._rates)
        number, reached = 0, 0.0
        for number, place in enumerate(range(max(self._rates) + 1), start=1):
            reached += self._rates.get(place, usual)
            if reached >= rate:
                return number
        return number + math.ceil(min(1e6, (rate - reached) / usual))
