"""What the adversary does, one event after the other, all of it from a seed.

Pure. The plan keeps book of the node servers as it has left them: at any time one of the first ones runs and can be
reached, so that there is a way to go on. What it takes away for a while comes back some events later.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass


class Kind(enum.Enum):
    """What happens."""

    KILL_WORKER = "kill a worker"
    SEGFAULT = "let a worker crash in __getitem__"
    HANG = "let a worker hang in __getitem__"
    STOP_WORKER = "stop a worker"
    STOP_SESSION = "stop a session"
    STOP_SERVER = "stop a node server"
    CONTINUE = "continue what was stopped"
    KILL_SESSION = "kill a session"
    KILL_SERVER = "kill a node server"
    TERM_SERVER = "drain a node server"
    START_SERVER = "start the node server again"
    ADD_SERVER = "add a node server"
    REMOVE_SERVER = "drain the added node server"
    TAKE_ROOM = "leave no room for open files"
    GIVE_ROOM = "give room for open files back"
    CUT = "cut the network"
    HEAL = "mend the network"
    SLOW = "slow the network down"
    DEAFEN_WORKER = "lose all that comes to a worker"


# How often each is tried. What ends a whole node is rarer than what ends a process.
WEIGHTS = {
    Kind.KILL_WORKER: 8,
    Kind.SEGFAULT: 3,
    Kind.HANG: 1,
    Kind.STOP_WORKER: 3,
    Kind.STOP_SESSION: 1,
    Kind.STOP_SERVER: 1,
    Kind.KILL_SESSION: 3,
    Kind.KILL_SERVER: 3,
    Kind.TERM_SERVER: 3,
    Kind.ADD_SERVER: 2,
    Kind.TAKE_ROOM: 2,
}
# A deaf worker is noticed after 25 s only, and holds its stream up for so long.
NETWORK_WEIGHTS = {Kind.CUT: 6, Kind.SLOW: 3, Kind.DEAFEN_WORKER: 1}

# What follows some events later, by itself.
_UNDONE_BY = {
    Kind.STOP_WORKER: Kind.CONTINUE,
    Kind.STOP_SESSION: Kind.CONTINUE,
    Kind.STOP_SERVER: Kind.CONTINUE,
    Kind.KILL_SERVER: Kind.START_SERVER,
    Kind.TERM_SERVER: Kind.START_SERVER,
    Kind.ADD_SERVER: Kind.REMOVE_SERVER,
    Kind.TAKE_ROOM: Kind.GIVE_ROOM,
    Kind.CUT: Kind.HEAL,
    Kind.SLOW: Kind.HEAL,
}
# Nobody can be sure to go on with such a node.
_TAKES_AWAY = {Kind.STOP_SESSION, Kind.STOP_SERVER, Kind.KILL_SERVER, Kind.TERM_SERVER, Kind.CUT, Kind.TAKE_ROOM}
_UNDONE_AFTER = (1, 4)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens."""

    kind: Kind
    place: int  # number of the node
    pick: float = 0.0  # which one of its processes, from 0 to 1


def plan(seed: int, num_places: int, *, network: bool = False, num_spared: int = 0) -> Iterator[Event]:
    """Events without end.

    Args:
        num_places: Nodes that are there from the beginning; one more comes and goes.
        network: Whether the network can be cut and slowed down.
        num_spared: The servers of the first so many nodes are not ended, so that they can be watched for long.
    """
    rng = random.Random(seed)
    weights = WEIGHTS | NETWORK_WEIGHTS if network else WEIGHTS
    pending: list[tuple[int, Event]] = []  # what undoes an event, and after how many events
    number = 0
    while True:
        number += 1
        due = next((entry for entry in pending if entry[0] <= number), None)
        if due is not None:
            pending.remove(due)
            yield due[1]
            continue
        disturbed = {event.place for _number, event in pending}
        (kind,) = rng.choices(list(weights), list(weights.values()))
        place = num_places if kind is Kind.ADD_SERVER else rng.randrange(num_places)
        event = Event(kind, place, rng.random())
        after = number + rng.randint(*_UNDONE_AFTER)
        if kind in _UNDONE_BY:
            if place in disturbed:
                continue  # one thing at a time to each node, or undoing would be ambiguous
            if kind in _TAKES_AWAY and len(disturbed - {num_places}) >= num_places - 1:
                continue
            if kind in (Kind.KILL_SERVER, Kind.TERM_SERVER) and place < num_spared:
                continue
            pending.append((after, Event(_UNDONE_BY[kind], place)))
        yield event
