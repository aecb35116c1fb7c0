"""``python -m tests.simulation.bugs``: plant bugs into engine and driver, and see that the simulation finds each.

A bug is a text of a module, which occurs once there, and what it is replaced with, so that it survives what does not
concern it. It is planted in memory, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import sys
from pathlib import Path
from typing import NamedTuple

import rpcdataloader

SECONDS = 180.0  # at most, for each bug: most take one


# By module of the package: the name of a mistake that somebody could make, a text and what it is replaced with, and
# perhaps another text.
_MISTAKES: dict[str, list[tuple[str, ...]]] = {
    "plan.table": [
        ("a batch that has killed a worker is sent to a second one", "is not None or task.killed:", "is not None:"),
        ("a batch is backed up before it is late", "straggler is not None and late_at <= now", "straggler is not None"),
        ("one backup task too many", "self._has_backup = True\n", "self._has_backup = len(task.holders) > 2\n"),
        ("out of order, a batch is backed up though others are left", "elif self.wants_input or", "elif False and"),
        ("a backup task keeps a worker from its other batches", "self._in_order or not one.in_flight", "True"),
        ("backup tasks count for ever", "> 1:\n            self._has_backup = False", "> 1:\n            pass"),
        ("a lost copy is sent again while another worker has one", "task is not None and not task.holders:", "task:"),
        (
            "what a lost worker had stays in the budget",
            "-= sum(share == 1 for share in record",
            "-= sum(False for _ in record",
        ),
        ("a draining worker is chosen again after its next answer", "if not record.draining and", "if"),
        ("a deadly batch kills one worker too many", "if len(task.killed) <", "if len(task.killed) <="),
        ("a batch is condemned while another worker has a copy", " or task.holders:", ":"),
        ("the oldest batch is blamed for another one", "said if said in in_flight and not self._has_streams else ", ""),
        ("the window is one too large", "< self.window", "<= self.window", ">= self.window", "> self.window"),
        ("a worker gets one batch too many", "if len(record.in_flight) >=", "if len(record.in_flight) >"),
        ("no window shrinks", "= self._wanted_window\n        self.answered", "= self.window\n        self.answered"),
        (
            "the newest batch is sent first",
            "self._waiting[at]):",
            "self._waiting[at := at if self._has_streams else len(self._waiting) - 1]):",
        ),
        (
            "the byte limit holds back what is waited for",
            "number == next(iter(self.tasks))\n        if not self._parts:\n            return len(self.tasks) ==",
            "False\n        if not self._parts:\n            return len(self.tasks) <",
        ),
        ("a task that died with its backup task is not answered", "self._note_answer(task, 0)", "task.size_bytes = 0"),
        ("no batch of a stream is ever deadly", "or task.holders:", "or task.holders or task.stream is not None:"),
        ("what an ended stream had stays in the budget", "]\n                self._num_in_flight -= 1", "]"),
        ("a saved pass goes on with another stream", "self._turn.rotate(-turn)", "self._turn.rotate(turn)"),
        ("a slow stream delays all", "not self._in_order:\n                stream", "False:\n                stream"),
        (
            "the task behind an answered one has no limit of time",
            "self._head_changed(record, now)\n        if not",
            "self._deadlines.pop(worker)\n        if not",
        ),
        ("the tasks of a condemned stream go on", "self._end_stream(task.stream, task.number + 1)", "pass"),
        ("the size of a batch is estimated by the average", "if size_bytes >", "if not"),
        ("what is delivered stays in the budget", "self.answered_bytes -= task.size_bytes or 0", "pass"),
        (
            "the time of a task begins with that of the one before",
            "self._deadlines.pop(record.id, None)",
            "before = self._deadlines.pop(record.id, None)",
            "self._deadlines[record.id] = now",
            "self._deadlines[record.id] = before or now",
        ),
        ("a late worker is ended again and again", "del self._deadlines[worker]", "pass"),
        ("a late worker is ended a second later", "<= now,", "<= now - 1,"),
        (
            "a batch is joined though a part is missing",
            "self.num_cut == self.num_samples and all",
            "self.parts and all",
        ),
        ("a worker gets two parts of a batch though others may come", "if batch.parts:\n", "if False:\n"),
        ("parts of a batch that is made as a whole go on", "self.superfluous += [(holder", "_ = [(holder"),
        ("what is left of a batch is sent again as a whole", "if 0 < task.num_cut < task.num_samples:", "if False:"),
        ("a death at a part does not count", "task.killed += killed", "pass"),
        (
            "a batch that has killed is made in parts",
            "if task.killed:\n            return num_samples",
            "if False:\n            return num_samples",
        ),
        (
            "the steady state has parts",
            "if task.number >= self._ramp_end and not",
            "if False and not",
            "if task.number < self._ramp_end:\n",
            "if True:\n",
        ),
        ("parts do not count in the budget", "(self._num_in_flight + _IN_PARTS) * self.batch", "0.0 * self.batch"),
        ("batches in parts stay in the budget", "self._num_in_flight -= _IN_PARTS", "pass"),
        (
            "a lost part is not sent again",
            "or self._parts.get(number)\n        if task is None:",
            "or None\n        if task is None:",
        ),
        ("a worker gets a second task before others have one", "if self._gathers:", "if False:"),
        ("idle workers wait for the first answer", "if is_unknown and record.in_flight and", "if is_unknown and"),
        ("workers that never come keep others from second tasks", "worker.task_seconds is not None or ", ""),
        (
            "all waits for the first answer, though no part is under way",
            "any(part.holders for part in self._parts.values()):\n            return None",
            "self._parts:\n            return None",
        ),
        (
            "parts are made though they did not fit",
            "self._make_whole(task)\n        self._split = None",
            "self._make_whole(task)",
        ),
    ],
    "plan.workers": [
        (
            "a task is kept for a worker that hangs",
            "if other is not None and other.overdue_at() <= now:",
            "if False:",
            "else min(other.overdue_at(), stale_at)",
            "else stale_at + 1e9",
        ),
        ("a backup task goes to a worker that is draining", "is not first and not worker.draining", "is not first"),
        ("a fast answer is late by far", "= max(_LATE_SECONDS, _LATE_FACTOR * median)", "= _LATE_FACTOR * median"),
        (
            "a worker that fails at once gets the tasks of all",
            "self.rests_until = self.since +",
            "self.rests_until = 0 *",
        ),
        ("nothing is ever late", "self.late_seconds = max(_LATE_SECONDS", "self.late_seconds = max(1e9"),
    ],
    "plan.roster": [
        (
            "a node that comes back without a place is not asked for it",
            "place.refused_by.discard(node)\n\n    def node_down",
            "pass\n\n    def node_down",
        ),
        ("a new epoch remembers who had no room", "place.refused_by.clear()", "pass"),
        ("a place whose node had no room stays closed", "place.is_closed = place.had_no_room = False", "pass"),
        ("a stream goes home while its worker is elsewhere", "is_settled and self._needs_all", "False"),
        ("no other node helps when all homes are gone", "self._needs_others else", "False else"),
        ("a stand-in is forgotten", "place.node = stand_in", "place.node = None"),
        ("streams whose workers die are forgotten", "= self.places[number].is_given_up = True", "= True"),
        (
            "the last nodes that are removed take their places with them",
            "if not self._needs_all and any(place.home != node for place in self.places if not place.is_closed):",
            "if not self._needs_all:",
        ),
        ("an ended stream gets a worker when its node is back", "place.is_given_up or not self._needs_all", "True"),
        ("a node is tried again without a longer pause", "min(2 * self.pauses[node], MAX_PAUSE)", "FIRST_PAUSE"),
        ("a mute node is asked, and one that answers is not", "if node not in self.mute", "if True"),
        ("a home that does not answer is not asked again", "if is_mute and (number,", "if False and (number,"),
        ("places that the loop does not want get workers", "itertools.islice(possible, self.most)", "possible"),
    ],
    "plan.crew": [
        ("the late news of a worker takes down the node that has come back", "if is_current and (not", "if (not"),
        ("all ranks take all workers of a new node", "number % options.world_size == options.rank", "True"),
        ("a worker sent away from a full node closes its place", "refused and not worker.is_sent_away", "refused"),
        ("a worker that does not come is asked for without end", "died or (not loss.came and", "died or (False and"),
        ("the loss of a node blames nothing, and neither do deaths", "> self._max_deaths", "> 1e9"),
        ("a pass gives up as soon as it has no workers", " + self._options.reconnect_timeout", ""),
        ("a pass without workers remembers an earlier time", "self.stuck_since = None  # also", "pass  # also"),
        ("a node that had no room is asked again at once", "FIRST_FULL_PAUSE / 2), MAX_FULL_PAUSE)", "0.0), 0.0)"),
        ("a node that had no room is not asked again in time", "*self._ask_at.values(), ", ""),
        ("a node that had no room ends a pass without workers", "any(not self.roster.is_hopeless(node)", "any(False"),
        ("a node without room is waited for without end", "if worker.node in self._full and not", "if False and not"),
        ("a pass ends though what kills its workers may pass", "must_rest = counts", "must_rest = False"),
        ("workers that die one after the other are waited for without end", "(worker.has_begun or not", "(True or not"),
        ("workers that exit by themselves are asked for again", "died and not loss.by_itself and", "died and"),
        (
            "a node whose workers exit before they begin is used for ever",
            "if has_failed and self._is_given_up",
            "if False and self._is_given_up",
        ),
        (
            "workers that are killed before they begin are replaced at once",
            'or self._not_begun[node]["killed"] >=',
            "or 1e9 <",
        ),
        (
            "where workers have died, one that begins does not count",
            "if self.stuck_since is not None:  # this",
            "if 0:  # this",
        ),
        ("a worker whose node answers at last stays late", "other.is_late = False", "pass"),
        ("a worker elsewhere ends the one that comes home", "not self.roster.is_at_home(place, other.node)", "True"),
        ("a node that had no room is not asked again for a mute one", "place].refused_by.clear()", "place]"),
        ("a node that cannot be reached is counted on for ever", "self._sought.get(node) == math.inf", "False"),
        ("a node that has not answered is forgotten with its worker", "workers, self._mute |", "workers,"),
        ("a stopped node is back when its session answers", "!= incarnation:  # otherwise", "!= 0:  # otherwise"),
        (
            "a worker that cannot begin ends the pass though others work",
            "not self._has_begun:\n            return",
            "self._num_opened:\n            return",
        ),
        ("a node whose workers cannot begin is used for ever", "< MAX_FAILED_STARTS or", "< 1e9 or"),
        ("exceptions of first requests count though others begin", "self._not_begun.pop(worker.node, None)", "pass"),
        ("workers that the loop does not want stay", "worker.place in spare and", "False and"),
    ],
    "plan.engine": [
        ("deaths count though workers answer", "self.crew.survived()\n        task =", "pass\n        task ="),
        ("a node that does not answer is waited for alone", "self.crew.tick(now)", "pass"),
        ("a constructor that always raises is tried again", "self.failure = self.failure or error", "pass"),
        ("tasks of a worker that cannot begin stay there", "False\n            self._leave(number)", "False"),
        ("a worker that cannot begin is kept", "self._send_away(worker)\n        if not self.crew", "if not self.crew"),
        ("the other copy of an answered task goes on", "[Cancel(loser.id, number) for loser in task.holders]", "[]"),
        ("draining workers join the next epoch", "worker.is_draining:\n                #", "False:\n                #"),
        ("a draining worker that hangs is waited for", "False\n                self._close_when_done(worker)", "False"),
        ("a worker sent away before it began is never closed", "at_work = True", "at_work = not worker.is_sent_away"),
        ("a node that is lost blames what its workers were at", "died = loss.node_is_up and", "died ="),
        ("a worker that is still starting is blamed on a task", "loss if died and worker.is_at_work", "loss if died"),
        ("a worker has the time of a task to begin", "if worker.has_begun and not was_idle:", "if True:"),
        ("a worker may hang in the last epoch", "if worker.has_begun and not was_idle:", "if False:"),
        ("a long wait is told again all the time", "= now + REPORT_AGAIN", "= now + 1.0"),
        ("a long wait is never told", "now, now + self._untold_seconds", "now, math.inf"),
        ("a long wait is told though one as long was", "min(2 * report.seconds, MOST_UNTOLD)", "0.0"),
        ("a wait that is over is told", "self._waiting_since = None\n        return task", "pass\n        return task"),
    ],
    "loader.driver": [
        (
            "the first decision comes before the nodes are up",
            "crew = self.engine.crew",
            "crew = self.engine.crew\n            self.feed(lambda _engine, _now: None)",
        ),
        ("a worker that was closed before it was opened stays", "and not member.is_closed", ""),
        ("a lost worker is kept, with its tasks", "self.seats.pop(number, None)", "pass"),
        ("a lost node wakes nobody", "self.has_changed = True\n            self.condition.notify_all()", "pass"),
        ("a worker that is sent the first requests of an earlier epoch", "if opening.begun is self.begun:", "if True:"),
        ("an open that fails is not reported", "engine.crew.open_failed(", "(lambda *_: 0)("),
        (
            "workers are not told of another epoch",
            "seat.restart(self.executor.restarting(todo.begun, seat.worker))",
            "pass",
        ),
        ("late workers are not ended", "if ends:", "if False:"),
        ("parts are joined though others did not fit meanwhile", " or not batch.has_all_parts:", ":"),
        ("parts of an earlier epoch are joined", "if begun is not self.begun or not", "if not"),
        ("workers of a pass that is left stay", "self.executor.close(workers)", "pass"),
        ("the consumer sleeps past what is due", "if self._due <= now:", "if False:"),
    ],
    "loader.seat": [
        ("answers of an earlier epoch count", "if sent.begun is not driver.begun or", "if"),
        ("tasks of an earlier epoch are sent", "self._queue.clear()", "pass"),
        ("an answer wakes nobody", "if driver.sleeps_until != -math.inf:", "if False:"),
        ("a task is sent to the workers in another order", "self._queue.popleft()", "self._queue.pop()"),
        ("a stream goes on elsewhere from its beginning", "driver.streams[task.stream] = answer.stream", "pass"),
    ],
}


class Bug(NamedTuple):
    """A mistake in a module."""

    name: str
    module: str
    changes: tuple[str, ...]  # what is replaced, with what, and so on

    @property
    def path(self) -> Path:
        return Path(rpcdataloader.__file__).parent / f"{self.module.replace('.', '/')}.py"


BUGS = [Bug(name, module, tuple(changes)) for module, found in _MISTAKES.items() for name, *changes in found]


def plant(bug: Bug) -> None:
    """Put a bug into this process.

    Raises:
        ValueError: The source has changed, so that the bug is none any more.
    """
    source = bug.path.read_text("utf-8")
    for old, new in zip(bug.changes[::2], bug.changes[1::2], strict=True):
        if source.count(old) != 1:
            raise ValueError(f"{bug.name!r} cannot be planted: {old!r} is {source.count(old)} times in {bug.path}")
        source = source.replace(old, new)
    planted = ("rpcdataloader.plan.", "rpcdataloader.loader.", "tests.simulation.")
    for name in [name for name in sys.modules if name.startswith(planted)]:
        del sys.modules[name]
    name = f"rpcdataloader.{bug.module}"
    spec = importlib.util.spec_from_loader(name, None)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(source, str(bug.path), "exec"), module.__dict__)


def hunt(number: int, seconds: float = SECONDS) -> tuple[int, float, str]:
    """Look for one bug, in a process that is thrown away; returns how long it took, and what the judge said."""
    plant(BUGS[number])
    from tests.simulation.simulator import simulate

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
