"""The crew, the workers of a pass: opened where the roster says, replaced when they end, or given up. Pure.

The roster knows the node of each place, and the nodes worth trying. The crew knows the workers themselves, from the
request until the loss, and what the end of each means for its place and its node. Worker numbers are never reused, so
late news of a lost worker cannot be taken for another's.

A worker that has not come within the connect timeout is *late*, and its node is *mute* until one comes. For the roster,
nodes that could not be reached within that time are mute, too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rpcdataloader.errors import ConnectionLostError, RPCError
from rpcdataloader.plan.actions import Action, Open, PlanOptions, Say, Seek
from rpcdataloader.plan.roster import FIRST_FULL_PAUSE, FIRST_PAUSE, MAX_FULL_PAUSE, Roster

N = TypeVar("N", bound=Hashable)

# Workers in a row that cannot begin, by an exception or an exit of user code, after which their node is no longer used.
# A node whose storage is away for a moment stays. After as many that were killed, it rests.
MAX_FAILED_STARTS = 3

# Missing workers and nodes that a summary names.
MAX_NAMED = 4


def told_of(node: Hashable, error: BaseException) -> str:
    """An error's text, for a sentence that has named the node."""
    return str(error).removeprefix(f"{node}: ")


def listed(counts: Counter[str]) -> str:
    """Numbers of things by their state, in words."""
    return ", ".join(f"{number} {state}" for state, number in counts.items()) or "none"


@dataclass(slots=True, eq=False)
class Member(Generic[N]):
    """A worker that was requested, and is not lost."""

    number: int
    place: int  # place that it fills; the stream of an iterable-style dataset
    node: N
    incarnation: Hashable
    asked_at: float
    late_at: float  # time at which it is late if it has not come; infinite once it has
    is_late: bool = False  # True if it has not come in time, for which other nodes are asked as well
    has_joined: bool = False  # True once it takes tasks
    is_at_work: bool = False  # True once it has answered the first request of this epoch
    has_begun: bool = False  # the same of any epoch
    is_draining: bool = False
    is_sent_away: bool = False  # True if it ends as soon as it has answered its requests
    is_closed: bool = False  # True once its end was requested

    @property
    def state(self) -> str:
        """What it does, in words."""
        if self.is_sent_away or self.is_draining:
            return "leaving"
        if self.has_joined:
            return "at work" if self.is_at_work else "beginning"
        return "late" if self.is_late else "requested"


@dataclass(frozen=True, slots=True)
class Loss:
    """The end of a worker, or the reason why it never started."""

    error: RPCError  # exception of its requests
    node_is_up: bool  # True if the session on its node still lives
    came: bool = True  # True if it had started; False if it was unreachable
    refusal: str = ""  # why the node had no room for it, without details that change; empty if it had
    has_retired: bool = False  # True if it has served its share of tasks, and may be replaced
    task: float | None = None  # number of its last task, from its own record; None if unknown
    by_itself: bool = False  # True if user code has ended its process, as another one's would be

    @property
    def was_refused(self) -> bool:
        """Whether the node had no room for it."""
        return bool(self.refusal)


class Crew(Generic[N]):
    """Workers, places and nodes.

    Args:
        others: Further nodes, which help while all homes are gone.

    Attributes:
        roster: Places and nodes. Its ``expects_more`` keeps a pass alive that has lost all nodes.
        num_deaths: Workers that have died since the last answer without a task to blame.
        late_at: Time at which :meth:`tick` finds the next node that has not answered, or asks one again that had no
            room; infinite without one.
        is_changed: True if workers, places or nodes have changed since :meth:`fill_places`.
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
        # Nodes
        self._incarnations: dict[N, Hashable] = {}
        self._gone: set[N] = set()  # nodes lost with all of their workers
        self._mute: set[N] = set()  # nodes where a worker has not come in time, until one comes
        self._joining: set[N] = set()  # tried to learn what they offer
        self._sought: dict[N, float] = {}  # time at which the present attempt to reach each node is late
        self._full: dict[N, float] = {}  # back-off of each node that has refused a worker since one has come
        self._ask_at: dict[N, float] = {}  # time at which it is asked again
        self.late_at = math.inf
        self._reasons: dict[N, BaseException] = {}  # why each node is unusable
        # Workers that did not begin on each node, in a row: those that "failed" by themselves, or were "killed".
        self._not_begun: defaultdict[N, Counter[str]] = defaultdict(Counter)
        self._has_begun = False  # True once a worker has answered its first request
        self._num_offered = options.num_offered
        # The end
        self.stuck_since: float | None = None  # time since which too few workers are left, and none can be opened
        self._last_error: BaseException | None = None  # end of the last worker

    # Workers

    def __iter__(self) -> Iterator[Member[N]]:
        return iter(list(self.members.values()))

    def remove(self, number: int) -> Member[N] | None:
        """Remove a lost worker; returns its record, None if that was done before."""
        self.is_changed = True
        return self.members.pop(number, None)

    def use(self, most: int | None) -> None:
        """Use at most this many workers from now on, in the first places; None for all."""
        self.roster.use(most)
        self.num_wanted = self.roster.num_used
        self.is_changed = True

    @property
    def superfluous(self) -> list[Member[N]]:
        """Workers whose places are not used."""
        spare = self.roster.spare
        return [worker for worker in self if worker.place in spare and not worker.is_sent_away]

    def reopen(self) -> None:
        """Begin another epoch: every place is needed again."""
        self.roster.reopen()
        self._full.clear()
        self._ask_at.clear()
        self.is_changed = True

    def ready(self, worker: Member[N], now: float) -> list[Member[N]]:
        """Note that a worker takes requests; returns the other workers of its place, which are no longer needed."""
        self.is_changed = True
        self._mute.discard(worker.node)
        if worker.node not in self._ask_at and not self._is_deadly(worker.node):
            self._full.pop(worker.node, None)
        for other in self.members.values():
            if other.node == worker.node and other.late_at != math.inf and not other.is_sent_away:  # that node answers
                other.late_at = now + self._options.connect_timeout
                if other.is_late:
                    other.is_late = False
                    self.roster.places[other.place].node = other.node
        worker.late_at, place = math.inf, worker.place
        self.roster.places[place].node = worker.node
        return [
            other
            for other in self
            if other.place == place and other.node != worker.node and not self.roster.is_at_home(place, other.node)
        ]

    def worker_began(self, worker: Member[N]) -> None:
        """Note that a worker has answered its first request."""
        self._has_begun = True
        self._not_begun.pop(worker.node, None)
        if worker.node not in self._ask_at:
            self._full.pop(worker.node, None)
        if self.stuck_since is not None:  # this one counts from now on
            self.is_changed = True

    def survived(self) -> None:
        """Note that a worker has answered a task after deaths."""
        self.num_deaths = 0
        self.is_changed = True

    @property
    def _are_dying(self) -> bool:
        """Whether workers die one after the other, before any answer."""
        return self.num_deaths > self._max_deaths

    def _is_deadly(self, node: N) -> bool:
        """Whether workers die there before they begin, though others may answer."""
        return self._are_dying or self._not_begun[node]["killed"] >= MAX_FAILED_STARTS

    def start_failed(self, worker: Member[N], error: BaseException) -> bool:
        """Note that a worker's first request raised an exception; returns False if no worker has ever answered."""
        if not self._has_begun:
            return False
        node, reason = worker.node, f"{type(error).__name__}: {error}"
        if not self._is_given_up(node, error, reason) and self._not_begun[node]["failed"] < MAX_FAILED_STARTS:
            self.say(f"a worker on {node} cannot begin, and is replaced: {reason}")
        return True

    def _is_given_up(self, node: N, error: BaseException, reason: str) -> bool:
        """Note that user code has let a worker not begin; returns whether its node is no longer used from now on."""
        self._not_begun[node]["failed"] += 1
        self.is_changed = True
        if self._not_begun[node]["failed"] < MAX_FAILED_STARTS or self.roster.is_hopeless(node):
            return False
        self.say(f"{node} is no longer used: {reason}")
        self._reasons[node] = error
        self.roster.node_hopeless(node)
        return True

    def open_failed(self, number: int, error: BaseException) -> None:
        """Note that a worker was not asked for: its node was gone, or it was no longer wanted."""
        worker = self.remove(number)
        if worker is not None:
            if not worker.is_closed:
                self._reasons[worker.node] = error
                self.roster.node_down(worker.node)
            self.roster.vacated(worker.place, worker.node, self._stand_in(worker.place))

    def lost(self, worker: Member[N], loss: Loss, *, is_needed: bool, is_blamed: bool, died: bool) -> None:
        """Draw the consequences of a worker's end for its place and its node.

        Args:
            worker: The worker, already removed.
            died: True if only the worker ended, and not its node.
        """
        place, node = worker.place, worker.node
        if loss.was_refused:
            self._mute.discard(node)
        is_missed = is_needed and not worker.is_sent_away and not (loss.has_retired and loss.node_is_up)
        counts = is_missed and not is_blamed and (died or (not loss.came and loss.node_is_up and not loss.was_refused))
        has_failed = counts and died and not worker.has_begun
        if counts:
            self.num_deaths += 1
        if has_failed and not loss.by_itself:
            self._not_begun[node]["killed"] += 1
        # Workers have begun before, and so may others: what kills them may pass, as a lack of room does.
        must_rest = counts and died and not loss.by_itself and self._has_begun and self._is_deadly(node)
        # One that was sent away while its node was full leaves a place that may be wanted again.
        was_refused = must_rest or (loss.was_refused and not worker.is_sent_away)
        if was_refused and node not in self._ask_at:
            self._full[node] = min(2 * self._full.get(node, FIRST_FULL_PAUSE / 2), MAX_FULL_PAUSE)
            self._ask_at[node] = math.inf  # until the time is known
        self.roster.vacated(place, node, self._stand_in(place), was_refused=was_refused)
        # News of an earlier session says nothing about the node's present one.
        is_current = self._incarnations.get(node) == worker.incarnation
        if is_current and (not loss.node_is_up or (not loss.came and not loss.was_refused)):
            self.roster.node_down(node)
        if not is_needed:
            self.roster.places[place].is_closed = True
        elif is_missed:
            self._last_error = loss.error
            if not self.roster.is_hopeless(node):  # why it is says more
                self._reasons[node] = loss.error
            if counts and self._are_dying and not must_rest:
                self.roster.give_up(place)
            has_failed = has_failed and loss.by_itself and self._has_begun  # as by an exception
            if has_failed and self._is_given_up(node, loss.error, told_of(node, loss.error)):
                return
            # A loop that chooses its number of workers asks for them again and again.
            is_usual = loss.was_refused and self.roster.most is not None
            if not is_usual and (loss.node_is_up or (is_current and node not in self._gone)):
                self._tell(worker, loss)

    def _stand_in(self, place: int) -> N | None:
        """The node of a worker at a place whose own worker has not come yet, or has ended."""
        members = self.members.values()
        return next((other.node for other in members if other.place == place and not other.is_sent_away), None)

    def _tell(self, worker: Member[N], loss: Loss) -> None:
        """Report the end of a worker, and what follows; once for a node that is lost with all of its workers."""
        if not loss.node_is_up:
            self._gone.add(worker.node)
        if self.roster.places[worker.place].is_given_up:
            self.say(
                f"{loss.error}; no other worker starts in its place: {self.num_deaths} have died before any answer"
            )
            return
        if self.roster.is_home_up(worker.place):
            self.say(f"{loss.error}; another worker starts there", cause=loss.refusal)
        else:
            left = [other for other in self.members.values() if other.node not in self._gone]
            news = f"waiting up to {self._options.reconnect_timeout:g} s (reconnect_timeout)"
            if num_there := sum(map(self._is_there, left)):
                news = f"going on with {num_there} of {self.num_wanted} workers"
            elif left:
                news = f"waiting for {len(left)} of {self.num_wanted} workers"
            self.say(f"{news}: {loss.error}", cause=loss.refusal)

    # Nodes

    def node_up(self, node: N, incarnation: Hashable, num_offered: int = 0) -> None:
        """Note that workers can be opened on a node.

        Args:
            incarnation: Identity of the node's session, different for each session.
            num_offered: Number of workers that it offers; only used for nodes that are new to the pass.
        """
        if node not in self._joining and (node not in self.roster.nodes or self.roster.is_hopeless(node)):
            return  # it was removed meanwhile
        self.is_changed = True
        if node in self._joining:
            self._join(node, num_offered)
        elif node in self._gone and self._incarnations.get(node) != incarnation:
            self.say(f"{node} is back")
        self._gone.discard(node)
        if self._incarnations.get(node) != incarnation:  # otherwise its session has answered, perhaps not its server
            self._mute.discard(node)
        self._incarnations[node] = incarnation
        self._reasons.pop(node, None)
        self.roster.node_up(node)

    def _join(self, node: N, num_offered: int) -> None:
        """Give a new node its places: this process's share of its workers."""
        options = self._options
        self._joining.discard(node)
        numbers = range(self._num_offered, self._num_offered + num_offered)
        self._num_offered += num_offered
        share = sum(number % options.world_size == options.rank for number in numbers)
        if options.max_workers:
            share = min(share, max(0, options.max_workers - self.roster.num_places))
        self.roster.add(node, 0 if options.is_iterable else share)
        self.num_wanted = self.roster.num_used
        self.say(f"{node} joins with {share} workers", is_warning=False)

    def node_missing(self, node: N, error: BaseException) -> None:
        """Note that a node is absent at the beginning of the pass."""
        self._reasons[node] = error

    def node_failed(self, node: N, error: BaseException, *, is_foreign: bool = False) -> None:
        """Note that a node could not be reached for now.

        Args:
            is_foreign: True if another server answered. It may have the port for a moment; but a node that is new to
                the pass is then given up.
        """
        if node not in self.roster.pauses:
            return  # it was removed, or given up
        if is_foreign and node in self._joining:
            self.node_hopeless(node, error)
            return
        if is_foreign and str(error) != str(self._reasons.get(node)):
            text = f"{node} is retried: {told_of(node, error)}"
            self.say(text, cause=text)
        self._reasons[node] = error
        self.is_changed = True
        self._sought.pop(node, None)
        self._out.append(Seek(node, self.roster.node_failed(node)))

    def node_hopeless(self, node: N, error: BaseException) -> None:
        """Note that a node can never be used: it cannot build the dataset, for example."""
        if node not in self.roster.pauses:
            return
        self.say(f"{node} is no longer used: {told_of(node, error)}")
        self._joining.discard(node)
        self._reasons[node] = error
        self.roster.node_hopeless(node)
        self.is_changed = True

    def add_nodes(self, nodes: Iterable[N]) -> None:
        """Add nodes to this pass."""
        for node in nodes:
            if node in self.roster.nodes:
                self.roster.add(node, 0)
            elif node not in self._joining:
                self._joining.add(node)
                self.roster.pauses[node] = FIRST_PAUSE
                self._out.append(Seek(node, FIRST_PAUSE))
        self.num_wanted = self.roster.num_used
        self.is_changed = True

    def remove_nodes(self, nodes: Iterable[N]) -> list[Member[N]]:
        """Remove nodes from this pass; returns their workers."""
        gone = set(nodes)
        for node in gone:
            self._joining.discard(node)
            self.roster.pauses.pop(node, None)
            if node in self.roster.nodes:
                self.roster.remove(node)
        self.num_wanted = self.roster.num_used
        self.is_changed = True
        return [worker for worker in self if worker.node in gone]

    # Actions

    def fill_places(self, now: float) -> None:
        """Look for nodes and open workers where worthwhile; for when :attr:`is_changed`."""
        self.is_changed = False
        limit = self._options.connect_timeout
        wanted = [worker for worker in self if not worker.is_sent_away]
        unreached = {node for node in self.roster.pauses if self._sought.get(node) == math.inf}
        while True:
            workers = [(worker.place, worker.node, worker.is_late) for worker in wanted]
            self.roster.note_workers(workers, self._mute | unreached)
            self._out += [Seek(node, FIRST_PAUSE) for node in self.roster.to_try()]
            if not (opened := self.roster.to_open()):
                break
            for place, node in opened:
                number = self._num_opened = self._num_opened + 1
                is_late = node in self.roster.mute  # asked as there is no other
                worker = Member(number, place, node, self._incarnations.get(node), now, now + limit, is_late)
                self.members[number] = worker
                wanted.append(worker)
                self._out.append(Open(number, place, node))
        self._ask_at = {node: now + self._full[node] if at == math.inf else at for node, at in self._ask_at.items()}
        self._sought = {node: self._sought.get(node, now + pause + limit) for node, pause in self.roster.pauses.items()}
        times = *self._sought.values(), *self._ask_at.values(), *(worker.late_at for worker in wanted)
        self.late_at = min(times, default=math.inf)
        if not self._is_stuck(wanted):
            self.stuck_since = None  # also if it was not stuck for a moment only
        elif self.stuck_since is None:
            self.stuck_since = now

    def _is_stuck(self, wanted: Sequence[Member[N]]) -> bool:
        """Whether the pass cannot go on with these workers, and those that leave."""
        # Those requested again from a node that had no room, or where they died, do not count at once: the time would
        # never end.
        unsure = [worker for worker in wanted if worker.node in self._full and not self._is_there(worker)]
        vacant = {worker.place for worker in unsure} - {worker.place for worker in wanted if worker not in unsure}
        has_others = not self._options.is_iterable and len(self.members) > len(unsure)
        return not has_others and self.roster.is_stuck(vacant)

    def _is_there(self, worker: Member[N]) -> bool:
        """Whether a worker has come; and begun, if others die before they do."""
        return worker.has_joined and (worker.has_begun or not self._is_deadly(worker.node))

    def tick(self, now: float) -> None:
        """Note that time has passed: ask other nodes as well where one has not answered, and those that had no room."""
        if now < self.late_at:
            return
        self.is_changed = True
        limit = self._options.connect_timeout
        for node in [node for node, at in self._ask_at.items() if at <= now]:
            self.ask_again(node)
        self._sought = {node: math.inf if late_at <= now else late_at for node, late_at in self._sought.items()}
        for worker in self:
            if worker.late_at <= now and not worker.is_sent_away:
                if worker.node not in self._mute:
                    self._mute.add(worker.node)
                    guess = "perhaps it is full, or builds a dataset"
                    self.say(f"no worker has started on {worker.node} within {limit:g} s; {guess}")
                worker.is_late, worker.late_at = True, now + limit
                self.roster.places[worker.place].refused_by.clear()

    def ask_again(self, node: N) -> None:
        """Ask a node that had no room for the workers that it has refused; its back-off is over."""
        del self._ask_at[node]
        self.roster.ask_again(node)
        self.num_wanted = self.roster.num_used

    def say(self, text: str, *, is_warning: bool = True, cause: str = "") -> None:
        """Queue a message for the user."""
        self._out.append(Say(self._options.label + text, is_warning, cause))

    def summary(self, now: float) -> str:
        """The state of workers and nodes in a line; workers that are missing, and nodes that do not answer, by name."""
        workers, nodes = Counter(worker.state for worker in self), Counter(map(self._state_of, self.roster.nodes))
        missing = [
            f"worker {worker.number} requested on {worker.node} {now - worker.asked_at:.0f} s ago"
            for worker in self
            if not worker.has_joined and not worker.is_sent_away
        ]
        missing += [f"{node} {state}" for node in self.roster.nodes if (state := self._state_of(node)) != "up"]
        named = f" ({', '.join([*missing[:MAX_NAMED], *['...'][: len(missing) - MAX_NAMED]])})" if missing else ""
        return f"workers: {listed(workers)}; nodes: {listed(nodes)}{named}"

    def _state_of(self, node: N) -> str:
        """What a node does, in words."""
        roster = self.roster
        if roster.is_hopeless(node):
            return "not used"
        if node in roster.mute:
            return "mute"
        return "tried" if node in roster.pauses else "down" if node in self._gone else "up"

    # The end

    @property
    def stuck_until(self) -> float:
        """Time at which waiting for workers becomes futile; infinite while there are enough to go on."""
        if self.stuck_since is None:
            return math.inf
        if not (self.roster.is_hopeful or any(not self.roster.is_hopeless(node) for node in self._full)):
            return self.stuck_since
        return self.stuck_since + self._options.reconnect_timeout

    def verdict(self) -> BaseException:
        """The error of a pass that cannot go on."""
        told = "; ".join(f"{node}: {reason}" for node, reason in self._reasons.items())
        if self.roster.is_hopeful:
            limit = f"{self._options.reconnect_timeout:g} s (reconnect_timeout)"
            return ConnectionLostError(f"no worker is left, and none came back within {limit}: {told}")
        # An exception of a constructor says more than the end of the last worker.
        raised = next((reason for reason in self._reasons.values() if not isinstance(reason, RPCError)), None)
        return raised or self._last_error or ConnectionLostError(f"no worker is left: {told}")
