"""The roster: the present and intended node of each worker of a pass, as nodes come and go.

Every place has a home: the node that this rank's share gave it. A place is vacant while its worker is gone, and is
filled at home again when home is back. While all homes are gone, all places are filled on the other nodes, spread
evenly, and given back later. For an iterable-style dataset a place is a stream, which cannot be missing: it is filled
elsewhere as soon as its home is gone, and stays there. Nodes may be added and removed.

A node that accepts everything and answers nothing is *mute*. It keeps the workers that it was asked for, in case that
it answers, but other nodes count in its place.

Pure: events go in, decisions come out, and the caller holds one lock around every call.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)

# First and longest back-off in seconds before a node is retried. The first one gives the news of a lost node time to
# reach its other workers. Each attempt itself waits while connections are refused, as servers need seconds to start.
FIRST_PAUSE = 0.1
MAX_PAUSE = 5.0

# The same of a node that had no room for a worker, before it is asked again.
FIRST_FULL_PAUSE = 1.0
MAX_FULL_PAUSE = 30.0


@dataclass(slots=True, eq=False)
class Place(Generic[N]):
    """Where a worker may be."""

    home: N
    node: N | None = None  # node where its worker is, or is being opened
    is_closed: bool = False  # a worker is no longer needed, or unavailable
    is_given_up: bool = False  # its workers died one after the other; it is vacant though needed
    had_no_room: bool = False  # closed until its home, which had no room, is asked again
    refused_by: set[N] = field(default_factory=set)


class Roster(Generic[N]):
    """Decides on which node a worker is opened, and which nodes are worth connecting to.

    Args:
        needs_all: True if no place may be missing (those of streams).

    Attributes:
        nodes: All nodes that were ever a part of this pass.
        pauses: Last back-off of each node that is being tried.
        mute: Nodes that have not answered in time.
        places: Possible workers, by number.
        expects_more: True if unknown nodes may still be added.
        most: Limit on the places in use, of which the first ones are preferred; None for no limit.
    """

    def __init__(self, homes: Sequence[N], others: Sequence[N] = (), *, needs_all: bool = False) -> None:
        self.places = [Place(home) for home in homes]
        self.nodes = list(dict.fromkeys([*homes, *others]))
        self.pauses: dict[N, float] = {}
        self._needs_all = needs_all
        self._up: set[N] = set()
        self._hopeless: set[N] = set()
        self.mute: set[N] = set()
        self._asked: set[tuple[int, N]] = set()  # places and nodes of all workers
        self._coming: set[tuple[int, N]] = set()  # of those that are not late
        self._settled: set[int] = set()  # their places
        self.expects_more = False
        self.most: int | None = None

    # Nodes

    def node_up(self, node: N) -> None:
        """Note that workers can be opened there."""
        self._up.add(node)
        self.pauses.pop(node, None)
        for place in self.places:
            place.refused_by.discard(node)

    def node_down(self, node: N) -> None:
        """Note that workers can no longer be opened there."""
        self._up.discard(node)

    def node_failed(self, node: N) -> float:
        """Note a failed attempt, so that other nodes may be asked; returns the back-off until the next one."""
        self.pauses[node] = min(2 * self.pauses[node], MAX_PAUSE)
        return self.pauses[node]

    def node_hopeless(self, node: N) -> None:
        """Give up a node that refuses this client or cannot build the dataset."""
        self._up.discard(node)
        self.pauses.pop(node, None)
        self._hopeless.add(node)

    def is_hopeless(self, node: N) -> bool:
        """Whether a node is no longer used, or was removed."""
        return node in self._hopeless

    def add(self, node: N, num_places: int) -> None:
        """Add a node to this pass, or a removed one again, with the places that it had then.

        Args:
            num_places: Number of places of a new node, as their home; 0 for a node that helps others.
        """
        self._hopeless.discard(node)
        if node not in self.nodes:
            self.nodes.append(node)
            self.places += [Place(node) for _ in range(num_places)]
        for place in self.places:
            # A stream's place closes when the stream has ended, unless it was given up.
            if place.home == node and (place.is_given_up or not self._needs_all):
                place.is_closed = place.is_given_up = place.had_no_room = False

    def remove(self, node: N) -> None:
        """Remove a node from this pass, with its places, unless there are no others."""
        self.node_hopeless(node)
        if not self._needs_all and any(place.home != node for place in self.places if not place.is_closed):
            for place in self.places:
                place.is_closed = place.is_closed or place.home == node

    def to_try(self) -> list[N]:
        """Nodes to connect to until each is up or hopeless: homes, and others while a place needs them."""
        homes = [place.home for place in self._used.values()]
        wanted = [*homes, *self._others(homes)] if self._needs_others else homes
        new = [
            node
            for node in dict.fromkeys(wanted)
            if node not in self._up and node not in self.pauses and node not in self._hopeless
        ]
        self.pauses.update(dict.fromkeys(new, FIRST_PAUSE))
        return new

    def _others(self, homes: Sequence[N]) -> list[N]:
        """As many nodes as there are places to fill, without those that do not answer."""
        others: list[N] = []
        for node in self.nodes:
            asked = (other for other in others if other not in self.mute)
            if sum(self.pauses.get(other, 0.0) <= FIRST_PAUSE for other in asked) == len(homes):
                break
            if node not in homes and node not in self._hopeless:
                others.append(node)
        return others

    @property
    def is_hopeful(self) -> bool:
        """Whether a node is being tried, or may be added."""
        return bool(self.pauses) or self.expects_more

    @property
    def num_places(self) -> int:
        """Number of possible workers."""
        return sum(not place.is_closed for place in self.places)

    @property
    def num_used(self) -> int:
        """Intended number of workers."""
        return len(self._used)

    @property
    def spare(self) -> set[int]:
        """Places beyond :attr:`most`, which have no worker."""
        return {number for number, place in enumerate(self.places) if not place.is_closed} - self._used.keys()

    @property
    def _used(self) -> dict[int, Place[N]]:
        """Places that are to have a worker, by number."""
        possible = ((number, place) for number, place in enumerate(self.places) if not place.is_closed)
        return dict(itertools.islice(possible, self.most))

    # Places

    def use(self, most: int | None) -> None:
        """Change :attr:`most`; where it exceeds the places, those whose home had no room are asked for again."""
        self.most = most
        if most is not None and most > self.num_used:
            for home in {place.home for place in self.places if place.had_no_room}:
                self.ask_again(home)

    def ask_again(self, node: N) -> None:
        """Let a node that had no room be asked for the workers that it has refused."""
        for place in self.places:
            place.refused_by.discard(node)
            if place.had_no_room and place.home == node and node not in self._hopeless:
                place.is_closed = place.had_no_room = False

    def note_workers(self, workers: Iterable[tuple[int, N, bool]], mute: Iterable[N]) -> None:
        """Note which workers are there or were asked for.

        Args:
            workers: Place and node of each worker, and whether it has not come in time.
            mute: Nodes that have not answered in time.
        """
        self._asked, self._coming, self.mute = set(), set(), set(mute)
        for place, node, is_late in workers:
            self._asked.add((place, node))
            if is_late:
                self.mute.add(node)
            else:
                self._coming.add((place, node))
        self._settled = {place for place, _node in self._coming}

    def to_open(self) -> list[tuple[int, N]]:
        """Return places to open a worker for, and the nodes: these places count as filled from now on.

        They include places that are filled elsewhere and whose home is back: the worker elsewhere leaves then.
        """
        opened: list[tuple[int, N]] = []
        is_deserted = self._is_deserted
        load = Counter(place.node for place in self.places)
        used = self._used
        for number, place in used.items():
            node = self._choose(number, load, is_deserted)
            if node is not None and node != place.node:
                place.node = node
                load[node] += 1
                if (number, node) not in self._asked:
                    opened.append((number, node))
        # A mute home may answer at last, whatever stands in for it.
        for number, place in ({} if self._needs_all else used).items():
            is_mute = place.home in self.mute and place.home in self._up and place.home not in place.refused_by
            if is_mute and (number, place.home) not in self._asked and (number, place.home) not in opened:
                place.node = place.home if place.node is None else place.node
                opened.append((number, place.home))
        return opened

    def vacated(self, number: int, node: N, stand_in: N | None = None, *, was_refused: bool = False) -> None:
        """Note that a place's worker has ended at ``node``; ignored if the place is filled at another node since.

        Args:
            stand_in: Node of a worker that has stood in for this one, and continues to.
            was_refused: True if the node has no room for a worker.
        """
        place = self.places[number]
        if place.node == node:
            place.node = stand_in
        if was_refused:
            place.refused_by.add(node)
            if not self._needs_all and place.node is None and node == place.home:
                place.is_closed = place.had_no_room = True

    def give_up(self, number: int) -> None:
        """Leave a place vacant though it needs a worker."""
        self.places[number].is_closed = self.places[number].is_given_up = True
        self.places[number].had_no_room = False
        self.places[number].refused_by.clear()

    def is_at_home(self, number: int, node: N) -> bool:
        """Whether the node is the home of a place, where its worker is preferred; streams have no preference."""
        return not self._needs_all and self.places[number].home == node

    def is_home_up(self, number: int) -> bool:
        """Whether a vacant place gets a worker at home."""
        place = self._used.get(number)
        return place is not None and place.home in self._up

    def reopen(self) -> None:
        """Begin another epoch: every place is needed again."""
        has_other_homes = not self._needs_all and any(place.home not in self._hopeless for place in self.places)
        for place in self.places:
            place.is_closed = place.home in self._hopeless and has_other_homes
            place.is_given_up = place.had_no_room = False
            place.refused_by.clear()

    def is_stuck(self, vacant: Container[int]) -> bool:
        """Whether the pass cannot go on with the filled places.

        Args:
            vacant: Places whose workers do not count.
        """
        if self._needs_all:
            left = (each for each in enumerate(self.places) if each[1].is_given_up or not each[1].is_closed)
            return any(place.node is None or number in vacant for number, place in left)
        return all(place.node is None or number in vacant for number, place in enumerate(self.places))

    def _choose(self, number: int, load: Counter[N | None], is_deserted: bool) -> N | None:
        place = self.places[number]
        is_settled = self._is_settled(number)
        if place.home in self._up and place.home not in self.mute and place.home not in place.refused_by:
            return place.node if is_settled and self._needs_all else place.home
        if is_settled or not (self._needs_all or is_deserted):
            return place.node
        candidates = [node for node in self.nodes if node in self._up and node not in place.refused_by]
        answering = [node for node in candidates if node not in self.mute]
        # A mute node may answer at last, and one is enough for a place that has nothing else to wait for.
        if not answering and place.node is None:
            answering = candidates
        return min(answering, key=lambda node: load[node], default=place.node)

    def _is_settled(self, number: int) -> bool:
        """Whether a place has a worker that is not late, or is leaving."""
        node = self.places[number].node
        return number in self._settled or (node is not None and (number, node) not in self._asked)

    @property
    def _is_deserted(self) -> bool:
        """Whether all homes are gone, or mute without a worker, so that others have to help."""
        return not any(
            place.home in self._up and (place.home not in self.mute or (number, place.home) in self._coming)
            for number, place in self._used.items()
        )

    @property
    def _needs_others(self) -> bool:
        """Whether a place that cannot be missing can only be filled at a node that is not up."""
        is_deserted = self._is_deserted
        if is_deserted or not self._needs_all:
            return is_deserted
        return any(
            not self._is_settled(number) and self._choose(number, Counter(), False) == place.node
            for number, place in self._used.items()
        )
