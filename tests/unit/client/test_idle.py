"""Loaders whose persistent workers are idle, as their workers' places are asked for."""

from __future__ import annotations

from types import SimpleNamespace

from rpcdataloader.client.idle import IdleWorkers


class Idler:
    def __init__(self, worker):
        self.workers, self.is_given_up = [worker], False

    def close(self):
        """Its workers end some time later."""


class Session(SimpleNamespace):
    @property
    def is_a_worker_leaving(self):
        return any(worker.draining for worker in self.workers)


def test_workers_that_ask_at_once_end_one_loader_and_those_that_ask_later_the_next():
    session = Session(name="node", num_exited=0, workers=[SimpleNamespace(draining=False) for _ in range(2)])
    for worker in session.workers:
        worker.session = session
    idlers = [Idler(worker) for worker in session.workers]
    idle, asking = IdleWorkers(), SimpleNamespace(session=session)
    for idler in idlers:
        idle.put(idler)
    assert idle.make_room(asking, 0)
    assert idle.make_room(asking, 0)  # the first one's worker has not ended yet
    assert [idler.is_given_up for idler in idlers] == [True, False]
    session.workers, session.num_exited = session.workers[1:], 1
    assert idle.make_room(asking, 0)  # it has ended since
    assert [idler.is_given_up for idler in idlers] == [True, False]
    assert idle.make_room(asking, 1)
    assert [idler.is_given_up for idler in idlers] == [True, True]
    session.workers, session.num_exited = [], 2
    assert not idle.make_room(asking, 2)
