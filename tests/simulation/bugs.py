"""``python -m tests.simulation.bugs``: plant bugs into engine and driver, and see that the simulation finds each.

A bug is a text of a module of ``rpcdataloader.plan`` or ``rpcdataloader.loader`` and what it is replaced with, so that
it survives what does not concern it. It is planted in memory, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import NamedTuple

import rpcdataloader

SECONDS = 60.0  # at most, for each bug


class Bug(NamedTuple):
    """A mistake that somebody could make."""

    name: str
    module: str
    old: str  # occurs once
    new: str
    also_old: str = ""
    also_new: str = ""


BUGS = [
    # The table of batches
    Bug(
        "a batch that has killed a worker is sent to a second one",
        "table",
        "len(task.holders) == 1 and not task.killed",
        "len(task.holders) == 1",
        "task.size_bytes is not None or task.killed:",
        "task.size_bytes is not None:",
    ),
    Bug(
        "second copies are sent while a batch that has killed a worker is waited for",
        "table",
        "task.size_bytes is not None or task.killed:",
        "task.size_bytes is not None:",
    ),
    Bug(
        "one second copy too many",
        "table",
        "(self.num_doubled and self.num_doubled >=",
        "(self.num_doubled > 1 and self.num_doubled >=",
    ),
    Bug(
        "second copies count for ever",
        "table",
        "            self.num_doubled -= 1\n",
        "            pass\n",
    ),
    Bug(
        "a lost copy is sent again while another worker has one",
        "table",
        "if task is not None and not task.holders:\n                bisect.insort",
        "if task is not None:\n                bisect.insort",
    ),
    Bug(
        "what a lost worker had stays in the budget",
        "table",
        "        self._num_in_flight -= len(record.in_flight)\n",
        "",
    ),
    Bug(
        "a draining worker is chosen again after its next answer",
        "table",
        "if not record.draining and len(record.in_flight) < self._prefetch_factor:",
        "if len(record.in_flight) < self._prefetch_factor:",
    ),
    Bug(
        "a deadly batch kills one worker too many",
        "table",
        "if len(task.killed) < self._max_deaths or",
        "if len(task.killed) <= self._max_deaths or",
    ),
    Bug(
        "a batch is condemned while another worker has a copy",
        "table",
        "if len(task.killed) < self._max_deaths or task.holders:",
        "if len(task.killed) < self._max_deaths:",
    ),
    Bug(
        "the oldest batch is blamed for another one",
        "table",
        "number = said if said in in_flight and not self._has_streams else next(iter(in_flight), None)",
        "number = next(iter(in_flight), None)",
    ),
    Bug(
        "the window is one too large",
        "table",
        "len(self.tasks) < self.window",
        "len(self.tasks) <= self.window",
        "len(self.tasks) >= self.window",
        "len(self.tasks) > self.window",
    ),
    Bug(
        "a worker gets one batch too many",
        "table",
        "if len(record.in_flight) >= self._prefetch_factor:",
        "if len(record.in_flight) > self._prefetch_factor:",
    ),
    Bug(
        "the window never shrinks",
        "table",
        "        self.window = self._wanted_window\n        self.answered_bytes",
        "        self.answered_bytes",
    ),
    Bug(
        "the newest batch is sent first",
        "table",
        "        for number in self._waiting:\n            if not self._may_send",
        "        for number in reversed(self._waiting):\n            if not self._may_send",
    ),
    Bug(
        "the byte limit holds back what the consumer waits for",
        "table",
        "            return number == next(iter(self.tasks))\n        return len(self.tasks) ==",
        "            return False\n        return len(self.tasks) <",
    ),
    Bug(
        "a task that died with its second copy is not answered",
        "table",
        "        self._note_answer(task, 0)\n",
        "        task.size_bytes = 0\n",
    ),
    # The table of streams
    Bug(
        "no batch of a stream is ever deadly",
        "table",
        "if len(task.killed) < self._max_deaths or task.holders:",
        "if len(task.killed) < self._max_deaths or task.holders or task.stream is not None:",
    ),
    Bug(
        "what an ended stream had stays in the budget",
        "table",
        "                del holders[0].in_flight[number]\n                self._num_in_flight -= 1\n",
        "                del holders[0].in_flight[number]\n",
    ),
    Bug("a saved pass goes on with another stream", "table", "self._turn.rotate(-turn)", "self._turn.rotate(turn)"),
    Bug(
        "a slow stream holds up the others",
        "table",
        "            if not self._in_order:\n                stream = next(",
        "            if self._num_added < 0:\n                stream = next(",
    ),
    Bug(
        "the task behind one that was answered has no limit of time",
        "table",
        "            self._head_changed(record, now)\n        self._num_in_flight",
        "            self._deadlines.pop(worker)\n        self._num_in_flight",
    ),
    Bug(
        "the tasks of a condemned stream go on",
        "table",
        "            self._end_stream(task.stream, number + 1)\n",
        "            pass\n",
    ),
    # Bytes and time
    Bug(
        "the size of a batch is estimated by the average",
        "table",
        "if size_bytes > self.batch_size_bytes:",
        "if not self.batch_size_bytes:",
    ),
    Bug("what is delivered stays in the budget", "table", "self.answered_bytes -= task.size_bytes or 0", "pass"),
    Bug(
        "the time of a task begins with that of the one before",
        "table",
        "        self._deadlines.pop(record.id, None)\n",
        "        before = self._deadlines.pop(record.id, None)\n",
        "self._deadlines[record.id] = now",
        "self._deadlines[record.id] = before or now",
    ),
    Bug(
        "a late worker is ended again and again",
        "table",
        "            del self._deadlines[worker]\n",
        "            pass\n",
    ),
    Bug(
        "a late worker is ended a second later",
        "table",
        "self._deadlines[worker] <= now,",
        "self._deadlines[worker] <= now - 1,",
    ),
    # Choosing
    Bug(
        "a task is kept for a worker that hangs",
        "workers",
        "    if other is not None and other.overdue_at() <= now:\n",
        "    if False:\n",
        "else min(other.overdue_at(), stale_at)",
        "else stale_at + 1e9",
    ),
    Bug(
        "a second copy goes to a worker that is draining",
        "workers",
        "worker is not first and not worker.draining and",
        "worker is not first and",
    ),
    Bug(
        "a fast answer is late by far",
        "workers",
        "self.late_seconds = max(_LATE_SECONDS, _LATE_FACTOR * median)",
        "self.late_seconds = _LATE_FACTOR * median",
    ),
    Bug("nothing is ever late", "workers", "self.late_seconds = max(_LATE_SECONDS", "self.late_seconds = max(1e9"),
    # Places and nodes
    Bug(
        "a node that has refused a worker is never asked again",
        "roster",
        "        for place in self._places:\n            place.refused_by.discard(node)\n",
        "",
    ),
    Bug(
        "a new epoch remembers who had no room",
        "roster",
        "            place.refused_by.clear()\n",
        "",
    ),
    Bug(
        "a place whose node had no room is never asked for again",
        "roster",
        "                    place.is_closed = False\n",
        "",
    ),
    Bug(
        "a stream goes home while its worker is elsewhere",
        "roster",
        "return place.node if is_settled and self._needs_all else place.home",
        "return place.home",
    ),
    Bug(
        "no other node helps when all homes are gone",
        "roster",
        "wanted = [*homes, *self._others(homes)] if self._needs_others else homes",
        "wanted = homes",
    ),
    Bug("a stand-in is forgotten", "roster", "place.node = stand_in", "place.node = None"),
    Bug(
        "streams whose workers die are forgotten",
        "roster",
        "self._places[number].is_closed = self._places[number].is_given_up = True",
        "self._places[number].is_closed = True",
    ),
    Bug(
        "the last nodes that are removed take their places with them",
        "roster",
        "if not self._needs_all and any(place.home != node for place in self._places if not place.is_closed):",
        "if not self._needs_all:",
    ),
    Bug(
        "a stream that has ended gets a worker when its node is added again",
        "roster",
        "place.home == node and (place.is_given_up or not self._needs_all)",
        "place.home == node",
    ),
    # The crew
    Bug(
        "the late news of a worker takes down the node that has come back",
        "crew",
        "if is_current and (not loss.node_is_up or",
        "if (not loss.node_is_up or",
    ),
    Bug("a place stays promised", "crew", "        self._promised.pop(worker.place, None)\n", ""),
    Bug(
        "a node is tried again without a longer pause", "roster", "min(2 * self.pauses[node], MAX_PAUSE)", "FIRST_PAUSE"
    ),
    Bug(
        "all ranks take all workers of a new node",
        "crew",
        "sum(number % options.world_size == options.rank for number in numbers)",
        "len(numbers)",
    ),
    Bug(
        "deaths count though workers answer",
        "engine",
        "        self.crew.num_deaths = 0\n        task = ",
        "        task = ",
    ),
    Bug(
        "a worker that was sent away while its node was full closes its place",
        "crew",
        "was_refused = loss.was_refused and not worker.is_sent_away",
        "was_refused = loss.was_refused",
    ),
    Bug(
        "a worker that does not come is asked for without end",
        "crew",
        "if not is_blamed and (died or (not loss.came and loss.node_is_up and not loss.was_refused)):",
        "if not is_blamed and died:",
    ),
    Bug(
        "the loss of a node blames nothing, and neither do deaths",
        "crew",
        "if self.num_deaths > self._max_deaths:",
        "if self.num_deaths > 1e9:",
    ),
    Bug(
        "a pass gives up as soon as it has no workers",
        "crew",
        "return self.stuck_since + self._options.reconnect_timeout",
        "return self.stuck_since",
    ),
    Bug(
        "a pass without workers remembers an earlier time",
        "crew",
        "            self.stuck_since = None  # also",
        "            pass  # also",
    ),
    # Nodes that accept everything and answer nothing
    Bug("a node that does not answer is waited for alone", "engine", "        self.crew.tick(now)\n", ""),
    Bug(
        "another node that does not answer is asked, and one that does is not",
        "roster",
        "answering = [node for node in candidates if node not in self.mute]",
        "answering = candidates",
    ),
    Bug(
        "a worker whose node answers at last stays late",
        "crew",
        "                    other.is_late = False\n",
        "                    pass\n",
    ),
    Bug(
        "a worker that comes elsewhere ends the one that comes home",
        "crew",
        "and not self.roster.is_at_home(place, other.node)",
        "and True",
    ),
    Bug(
        "a node that had no room is not asked again for one that does not answer",
        "crew",
        "                self.roster.ask_again(worker.place)\n",
        "                pass\n",
    ),
    Bug(
        "a node that cannot be reached is counted on for ever",
        "crew",
        "unreached = {node for node in self.roster.pauses if self._sought.get(node) == math.inf}",
        "unreached: set[N] = set()",
    ),
    Bug(
        "a node that has not answered is forgotten with its worker",
        "crew",
        "workers, self._mute | unreached)",
        "workers, unreached)",
    ),
    Bug(
        "a node server that is stopped seems to be back as its session answers",
        "crew",
        "        if self._incarnations.get(node) != incarnation:  # otherwise",
        "        if True:  # otherwise",
    ),
    Bug(
        "a home that does not answer is not asked again",
        "roster",
        "if self._is_mute_home(place) and is_unasked:",
        "if False:",
    ),
    # Workers that cannot begin
    Bug(
        "a worker that cannot begin ends the pass though others work",
        "crew",
        "        if not self._has_begun:\n            return False\n",
        "        if self._num_opened:\n            return False\n",
    ),
    Bug(
        "a constructor that always raises is tried again",
        "engine",
        "            self.failure = self.failure or error\n",
        "            pass\n",
    ),
    Bug(
        "a node whose workers cannot begin is used for ever",
        "crew",
        "if self._num_failed[node] < MAX_FAILED_STARTS:",
        "if self._num_failed[node] < 1e9:",
    ),
    Bug(
        "exceptions of first requests count though others begin",
        "crew",
        "        self._num_failed.pop(worker.node, None)\n",
        "",
    ),
    Bug(
        "tasks of a worker that cannot begin stay there",
        "engine",
        "            worker.has_joined = False\n            self._leave(number)\n        if worker.is_sent_away:",
        "            worker.has_joined = False\n        if worker.is_sent_away:",
    ),
    Bug(
        "a worker that cannot begin is kept",
        "engine",
        "        self._send_away(worker)\n        if not self.crew.start_failed",
        "        if not self.crew.start_failed",
    ),
    # The engine
    Bug(
        "the other copy of an answered task is not cancelled",
        "engine",
        "            self._out += [Cancel(loser.id, number) for loser in task.holders]\n",
        "            pass\n",
    ),
    Bug(
        "draining workers take part in the next epoch",
        "engine",
        "            if worker.is_draining:\n                # All",
        "            if False:\n                # All",
    ),
    Bug(
        "a draining worker that hangs in the last epoch is waited for",
        "engine",
        "                worker.has_joined = False\n                self._close_when_done(worker)\n",
        "                worker.has_joined = False\n",
    ),
    Bug(
        "a worker that was sent away before it began is never closed",
        "engine",
        "worker.is_at_work = True",
        "worker.is_at_work = not worker.is_sent_away",
    ),
    Bug(
        "a node that is lost blames what its workers were at",
        "engine",
        "died = loss.node_is_up and loss.came and not worker.is_draining",
        "died = loss.came and not worker.is_draining",
    ),
    Bug(
        "a worker that is still starting is blamed on a task",
        "engine",
        "loss if died and worker.is_at_work else None)",
        "loss if died else None)",
    ),
    Bug(
        "a long wait is told again all the time",
        "engine",
        "self._report_at = now + REPORT_AGAIN",
        "self._report_at = now + 1.0",
    ),
    Bug("a long wait is never told", "engine", "now, now + REPORT_AFTER", "now, math.inf"),
    Bug(
        "a wait that is over is told",
        "engine",
        "            self._waiting_since = None\n        return task",
        "            pass\n        return task",
    ),
    # The driver
    Bug(
        "the first decision comes before the nodes are up",
        "driver",
        "            crew = self.engine.crew\n",
        "            crew = self.engine.crew\n            self.feed(lambda _engine, _now: None)\n",
    ),
    Bug(
        "answers of an earlier epoch count",
        "seat",
        "if sent.begun is not driver.begun or driver.is_closed:",
        "if driver.is_closed:",
    ),
    Bug("tasks of an earlier epoch are sent", "seat", "            self._queue.clear()\n", ""),
    Bug(
        "a worker that was closed before it was opened stays",
        "driver",
        "                self._unwanted.add(number)\n",
        "                pass\n",
    ),
    Bug(
        "a lost worker is kept, with its tasks",
        "driver",
        "            self.seats.pop(number, None)\n",
        "            pass\n",
    ),
    Bug("an answer wakes nobody", "seat", "if driver.sleeps_until != -math.inf:", "if False:"),
    Bug(
        "a lost node wakes nobody",
        "driver",
        "            self.has_changed = True\n            self.condition.notify_all()\n",
        "",
    ),
    Bug(
        "a worker that is sent the first requests of an earlier epoch",
        "driver",
        "if opening.begun is self.begun:",
        "if True:",
    ),
    Bug("a task is sent to the workers in another order", "seat", "self._queue.popleft()", "self._queue.pop()"),
    Bug(
        "an open that fails is not reported",
        "driver",
        "        self.feed(lambda engine, _now: engine.crew.open_failed(",
        "        (lambda engine, _now: engine.crew.open_failed(",
    ),
    Bug(
        "workers are not told of another epoch",
        "driver",
        "                    self._restart(action.worker, todo.begun)\n",
        "                    pass\n",
    ),
    Bug("late workers are not ended", "driver", "        if ends:\n", "        if False:\n"),
    Bug("workers of a pass that is left stay", "driver", "        self.executor.close(workers)\n", ""),
    Bug(
        "a stream goes on elsewhere from its beginning",
        "seat",
        "            driver.streams[task.stream] = answer.stream\n",
        "            pass\n",
    ),
    Bug("the consumer sleeps past what is due", "driver", "        if self._due <= now:\n", "        if False:\n"),
    Bug(
        "workers that the loop does not want stay",
        "crew",
        "[worker for worker in self if worker.place in spare and not worker.is_sent_away]",
        "[]",
    ),
    Bug(
        "places that the loop does not want get workers",
        "roster",
        "dict(itertools.islice(possible, self.most))",
        "dict(possible)",
    ),
]


def replaced(bug: Bug) -> str:
    """The source of a module with a bug in it.

    Raises:
        ValueError: The source has changed, so that the bug is none any more.
    """
    source = path_of(bug).read_text("utf-8")
    for old, new in ((bug.old, bug.new), (bug.also_old, bug.also_new)):
        if old and source.count(old) != 1:
            raise ValueError(f"{bug.name!r} cannot be planted: {old!r} is {source.count(old)} times in {bug.module}.py")
        source = source.replace(old, new) if old else source
    return source


def path_of(bug: Bug) -> Path:
    return Path(rpcdataloader.__file__).parent / package_of(bug) / f"{bug.module}.py"


def package_of(bug: Bug) -> str:
    return "loader" if bug.module in ("driver", "seat") else "plan"


def plant(bug: Bug) -> None:
    """Put a bug into this process."""
    source = replaced(bug)
    planted = ("rpcdataloader.plan.", "rpcdataloader.loader.", "tests.simulation.")
    for name in [name for name in sys.modules if name.startswith(planted)]:
        del sys.modules[name]
    name = f"rpcdataloader.{package_of(bug)}.{bug.module}"
    spec = importlib.util.spec_from_loader(name, None)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source, str(path_of(bug)), "exec"), module.__dict__)


def hunt(number: int, seconds: float = SECONDS) -> tuple[int, float, str]:
    """Look for one bug, in a process that is thrown away; returns how long it took, and what the judge said."""
    plant(BUGS[number])
    from tests.simulation.campaign import simulate

    report = simulate(seconds)
    return number, report.seconds, report.violation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.bugs", description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default: 2)")
    parser.add_argument("--match", default="", help="only those whose names contain this")
    args = parser.parse_args()
    numbers = [number for number, bug in enumerate(BUGS) if args.match in bug.name]
    caught = []
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        for number, seconds, violation in pool.imap_unordered(hunt, numbers):
            print(f"{seconds:5.1f} s  {BUGS[number].name}: {violation[:150] or 'NOT CAUGHT'}", flush=True)
            if violation:
                caught.append(number)
    print(f"{len(caught)} of {len(numbers)} planted bugs caught")
    return int(len(caught) < len(numbers))


if __name__ == "__main__":
    sys.exit(main())
