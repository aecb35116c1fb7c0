"""The workers of a pass: asked for where the roster says, replaced when they end, given up when it is of no use. Pure.

The roster knows at which node each place is, and which nodes are worth trying. The crew knows the workers themselves,
from the moment in which one is asked for until it is lost, and what the end of each means for its place and its node.
Workers are numbers that are never used twice, so that news of one that is gone cannot be taken for another's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.plan.actions import Action, Open, PlanOptions, Say, Seek
from rpcdataloader.plan.roster import Roster

N = TypeVar("N", bound=Hashable)

# Seconds before a node is tried again: the first time, and at most. The first pause is for the others: of a node that
# has just been lost, they may not know it yet. Each try is itself patient while nobody listens there, as a node server
# needs some seconds to start.
FIRST_PAUSE = 0.1
MAX_PAUSE = 5.0


@dataclass(slots=True, eq=False)
class Member(Generic[N]):
    """A worker that was asked for, and is not lost.

    Attributes:
        place: Which of the places it fills; the stream of an iterable-style dataset.
        has_joined: It takes tasks.
        is_at_work: It has answered the first request of this epoch.
        is_sent_away: It ends as soon as it has answered what it has.
        is_closed: Its end was asked for.
    """

    number: int
    place: int
    node: N
    incarnation: Hashable
    has_joined: bool = False
    is_at_work: bool = False
    is_draining: bool = False
    is_sent_away: bool = False
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """How a worker has ended, or why it never came to be.

    Attributes:
        error: What its requests have failed with.
        node_is_up: The session on its node is there.
        came: It was there; False if it could not be reached.
        was_refused: The node had no room for it.
        has_retired: It has done its share of work, and another one may take its place.
        task: What it was at when it ended, in its own words; None if that is not known.
        place: Of the sample in that task; None if it was at no sample.
    """

    error: RPCError
    node_is_up: bool
    came: bool = True
    was_refused: bool = False
    has_retired: bool = False
    task: int | None = None
    place: int | None = None


class Crew(Generic[N]):
    """Workers, places and nodes.

    Args:
        others: More nodes, which help while all homes are gone.

    Attributes:
        num_deaths: Workers that have died since the last answer, for which no task is to blame.
        is_changed: Workers, places or nodes have changed since :meth:`fill_places`.
        is_stuck: There were too few workers to go on, and none could be opened, when :meth:`fill_places` was called.
    """

    def __init__(self, options: PlanOptions, homes: Sequence[N], others: Sequence[N], out: list[Action]) -> None:
        self.num_wanted = len(homes)
        self.roster = Roster(homes, others, needs_all=options.is_iterable)
        self._options = options
        self._out = out
        self.is_changed = True
        # Workers
        self.members: dict[int, Member[N]] = {}
        self._num_opened = 0
        self.num_deaths = 0
        self._max_deaths = options.max_retries * len(homes)
        self._promised: set[int] = set()  # places whose worker has retired, so that there is room for the next
        # Nodes
        self._nodes = set(homes) | set(others)
        self._incarnations: dict[N, Hashable] = {}
        self._gone: set[N] = set()  # those that were lost with all of their workers
        self._joining: set[N] = set()  # tried, as it is not known yet what they offer
        self._pauses: dict[N, float] = {}  # before the last try of each node that is being tried
        self._reasons: dict[N, BaseException] = {}  # why each node is of no use
        self._num_offered = options.num_offered
        # The end
        self.is_stuck = False
        self._stuck_since: float | None = None
        self._last_error: BaseException | None = None  # how the last worker ended

    # Workers

    def __iter__(self) -> Iterator[Member[N]]:
        return iter(list(self.members.values()))

    def remove(self, number: int) -> Member[N] | None:
        """A worker is lost; returns what it was, None if that is known already."""
        self.is_changed = True
        return self.members.pop(number, None)

    def reopen(self) -> None:
        """Another epoch begins: every place is needed again."""
        self.roster.reopen()
        self.is_changed = True

    def ready(self, worker: Member[N]) -> list[Member[N]]:
        """A worker takes requests; returns those that have stood in for it."""
        self._promised.discard(worker.place)
        return [other for other in self if other.place == worker.place and other.node != worker.node]

    def open_failed(self, number: int, error: BaseException) -> None:
        """A node was gone before it could be asked for a worker."""
        worker = self.remove(number)
        if worker is not None:
            self._reasons[worker.node] = error
            self.roster.node_down(worker.node)
            self.roster.vacated(worker.place, worker.node, self._stand_in(worker.place))

    def lost(self, worker: Member[N], loss: Loss, *, is_needed: bool, is_blamed: bool, died: bool) -> None:
        """What the end of a worker means for its place and its node.

        Args:
            worker: Removed already.
            died: It has ended of itself, and its node has not.
        """
        place, node = worker.place, worker.node
        vacate = self.roster.refused if loss.was_refused else self.roster.vacated
        vacate(place, node, self._stand_in(place))
        # News of an earlier session says nothing about the node as it is now.
        is_current = self._incarnations.get(node) == worker.incarnation
        if is_current and (not loss.node_is_up or (not loss.came and not loss.was_refused)):
            self.roster.node_down(node)
        if not is_needed:
            self.roster.close(place)
        elif worker.is_sent_away:
            pass
        elif loss.has_retired and loss.node_is_up:
            self._promised.add(place)
        else:
            self._reasons[node] = self._last_error = loss.error
            if not is_blamed and (died or (not loss.came and loss.node_is_up and not loss.was_refused)):
                self._count_death(place)
            if loss.node_is_up or (is_current and node not in self._gone):
                self._tell(worker, loss)

    def _stand_in(self, place: int) -> N | None:
        """The node of a worker that is at a place while the one at home has not come, or has ended."""
        members = self.members.values()
        return next((other.node for other in members if other.place == place and not other.is_sent_away), None)

    def _count_death(self, place: int) -> None:
        self.num_deaths += 1
        if self.num_deaths > self._max_deaths:
            self.roster.give_up(place)  # they die before they answer anything

    def _tell(self, worker: Member[N], loss: Loss) -> None:
        """Say how a worker ended, and what follows; of a node that is lost with all of its workers, once."""
        if not loss.node_is_up:
            self._gone.add(worker.node)
        if self.roster.is_home_up(worker.place):
            self.say(f"{loss.error}; another worker starts there")
        else:
            num_left = sum(other.node not in self._gone for other in self.members.values())
            self.say(f"going on with {num_left} of {self.num_wanted} workers: {loss.error}")

    # Nodes

    def is_sought(self, node: N) -> bool:
        """Whether it is of interest if a node can be reached."""
        return node in self._joining or node in self._pauses

    def node_up(self, node: N, incarnation: Hashable, num_offered: int) -> None:
        """Workers can be opened on a node."""
        if node not in self._joining and (node not in self._nodes or self.roster.is_hopeless(node)):
            return  # removed meanwhile
        self.is_changed = True
        self._pauses.pop(node, None)
        if node in self._joining:
            self._join(node, num_offered)
        elif node in self._gone and self._incarnations.get(node) != incarnation:
            self.say(f"{node} is there again")
        self._gone.discard(node)
        self._incarnations[node] = incarnation
        self._reasons.pop(node, None)
        self.roster.node_up(node)

    def _join(self, node: N, num_offered: int) -> None:
        """Give a node that is new its places: this process's share of what it offers."""
        options = self._options
        self._joining.discard(node)
        self._nodes.add(node)
        numbers = range(self._num_offered, self._num_offered + num_offered)
        self._num_offered += num_offered
        share = sum(number % options.world_size == options.rank for number in numbers)
        if options.max_workers:
            share = min(share, max(0, options.max_workers - self.roster.num_places))
        self.roster.add(node, 0 if options.is_iterable else share)
        self.num_wanted = self.roster.num_places
        self.say(f"{node} joins with {share} workers", is_warning=False)

    def node_missing(self, node: N, error: BaseException) -> None:
        """A node that the pass begins with is not there."""
        self._reasons[node] = error

    def node_failed(self, node: N, error: BaseException, *, is_foreign: bool) -> None:
        """A node could not be reached, which may change."""
        if not self.is_sought(node):
            return
        if is_foreign and node in self._joining:
            self.node_hopeless(node, error)
            return
        if is_foreign and str(error) != str(self._reasons.get(node)):
            self.say(f"{node} is tried again: {error}")
        self._reasons[node] = error
        self.roster.node_failed(node)
        self.is_changed = True
        self._pauses[node] = min(2 * self._pauses[node], MAX_PAUSE)
        self._out.append(Seek(node, self._pauses[node]))

    def node_hopeless(self, node: N, error: BaseException) -> None:
        """A node can never be used: it cannot build the dataset, for example."""
        if not self.is_sought(node):
            return
        self.say(f"{node} is not used any more: {error}")
        self._pauses.pop(node, None)
        self._joining.discard(node)
        self._reasons[node] = error
        self.roster.node_hopeless(node)
        self.is_changed = True

    def add_nodes(self, nodes: Iterable[N]) -> None:
        """More nodes are there for this pass."""
        for node in nodes:
            if node in self._nodes:
                self.roster.add(node, 0)
            elif node not in self._joining:
                self._joining.add(node)
                self._seek(node)
        self.num_wanted = self.roster.num_places
        self.is_changed = True

    def remove_nodes(self, nodes: Iterable[N]) -> list[Member[N]]:
        """Nodes are not for this pass any more; returns their workers."""
        gone = set(nodes)
        for node in gone:
            self._joining.discard(node)
            self._pauses.pop(node, None)
            if node in self._nodes:
                self.roster.remove(node)
        self.num_wanted = self.roster.num_places
        self.is_changed = True
        return [worker for worker in self if worker.node in gone]

    def _seek(self, node: N) -> None:
        self._pauses[node] = FIRST_PAUSE
        self._out.append(Seek(node, FIRST_PAUSE))

    # What is to be done

    def fill_places(self) -> None:
        """Look for the nodes that are worth it, and open workers; to be called when :attr:`is_changed`."""
        self.is_changed = False
        for node in self.roster.to_try():
            self._seek(node)
        for place, node in self.roster.to_open():
            self._num_opened += 1
            self.members[self._num_opened] = Member(self._num_opened, place, node, self._incarnations.get(node))
            self._out.append(Open(self._num_opened, place, node, place in self._promised))
        self.is_stuck = self.roster.is_stuck and (not self.members or self._options.is_iterable)
        if not self.is_stuck:
            self._stuck_since = None  # also if it was not stuck for a moment only

    def say(self, text: str, *, is_warning: bool = True) -> None:
        """Tell the user."""
        self._out.append(Say(self._options.label + text, is_warning))

    # The end

    @property
    def _is_hopeful(self) -> bool:
        return self.roster.is_hopeful or bool(self._joining)

    def stuck_until(self, now: float) -> float | None:
        """When it is of no use to wait for workers any longer; None while there are enough to go on."""
        if not self.is_stuck:
            return None
        if self._stuck_since is None:
            self._stuck_since = now
        return self._stuck_since + self._options.reconnect_timeout if self._is_hopeful else now

    def verdict(self) -> BaseException:
        """Why it is of no use to wait."""
        if self._is_hopeful:
            told = "; ".join(f"{node}: {reason}" for node, reason in self._reasons.items())
            limit = f"{self._options.reconnect_timeout:g} s (reconnect_timeout)"
            return ConnectionLostError(f"no worker is left, and none came back within {limit}: {told}")
        # What a constructor has raised says more than how the last worker ended.
        raised = [reason for reason in self._reasons.values() if not isinstance(reason, RPCError)]
        return next(iter(raised), None) or self._last_error or ConnectionLostError("no worker is left")
