"""What goes wrong: each kind of fault, and what it does to the cluster."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.cluster import LOST, Cluster, Node, Worker
from tests.simulation.passes import DIED, Pass
from tests.simulation.ranks import Rank
from tests.simulation.scenarios import Fault, Noise


def inject(cluster: Cluster, fault: Fault) -> None:
    """Let something go wrong."""
    kind = fault.kind
    cluster.counts[kind] += 1
    if kind in _WORKER_FAULTS:
        if cluster.alive:
            _WORKER_FAULTS[kind](cluster, cluster.alive[fault.pick % len(cluster.alive)], fault)
    elif kind in _NODE_FAULTS:
        nodes = list(cluster.nodes.values())
        _NODE_FAULTS[kind](cluster, nodes[fault.pick % len(nodes)], fault)
    else:
        rank = cluster.ranks[fault.pick % len(cluster.ranks)]
        crew = rank.crew
        if crew is not None and not crew.is_closed:
            _RANK_FAULTS[kind](cluster, rank, crew, fault)


def heal(cluster: Cluster) -> None:
    """No more faults: what is broken is mended."""
    now = cluster.now
    cluster.noise = Noise(*(0.0,) * 5)
    for node in cluster.nodes.values():
        node.until.clear()
        node.mute_until = now
        node.is_up = True
    for worker in cluster.alive:
        worker.hung_until = min(worker.hung_until, now)
        worker.dies_answering = False
    for rank in cluster.ranks:
        rank.paused_until = min(rank.paused_until, now)


# Workers


def _kill(cluster: Cluster, worker: Worker, fault: Fault) -> None:
    cluster.die(worker, DIED)


def _hang(cluster: Cluster, worker: Worker, fault: Fault) -> None:
    if worker.hung_until <= cluster.now:
        worker.hung_until = cluster.now + (2 + 200 * fault.size**3) * max(1.0, cluster.scenario.seconds)


def _kill_while_answering(cluster: Cluster, worker: Worker, fault: Fault) -> None:
    worker.dies_answering = True


def _retire(cluster: Cluster, worker: Worker, fault: Fault) -> None:
    if worker.is_draining:
        return
    worker.is_draining = worker.will_retire = True
    cluster.after(cluster.latency(), worker.crew.drain, worker)
    if not worker.is_busy:
        worker.is_busy = True
        cluster.after(2 * cluster.latency(), _finish, cluster, worker)


def _finish(cluster: Cluster, worker: Worker) -> None:
    """A worker that retires answers what it has received."""
    if worker.is_alive:
        worker.is_busy = False
        worker.crew.work(worker)


# Nodes


def _lose_node(cluster: Cluster, node: Node, fault: Fault) -> None:
    if node.is_up:
        cluster.lose_node(node)
        delay = fault.size**2 * (20 if fault.pick & 7 else 600)
        cluster.after(delay, cluster.return_node, node, node.incarnation)


def _drain_node(cluster: Cluster, node: Node, fault: Fault) -> None:
    if not node.answers:
        return
    node.is_draining = True
    for worker in [worker for worker in cluster.alive if worker.node is node]:
        if not worker.is_draining:
            worker.is_draining = True
            cluster.after(cluster.latency(), worker.crew.drain, worker)
            if not worker.is_busy:
                worker.is_busy = True
                cluster.after(cluster.random.random() * fault.size * 10, cluster.die, worker, LOST)
    cluster.after(fault.size * 30, _end_draining, cluster, node, node.incarnation, fault)


def _end_draining(cluster: Cluster, node: Node, incarnation: int, fault: Fault) -> None:
    if node.incarnation == incarnation and node.is_up:
        cluster.lose_node(node)
        cluster.after(fault.size * 10, cluster.return_node, node, node.incarnation)


def _spoil(cluster: Cluster, node: Node, fault: Fault) -> None:
    """It lets nobody in, or only some or late, or ends some of its workers, or first requests raise, exit or kill."""
    node.until[fault.kind] = cluster.now + fault.size * 100 * cluster.scenario.seconds


def _replace(cluster: Cluster, node: Node, fault: Fault) -> None:
    """It ends, and comes back as another one, or without what the dataset needs."""
    node.until[fault.kind] = cluster.now + fault.size * 30
    _lose_node(cluster, node, fault)


def _mute(cluster: Cluster, node: Node, fault: Fault) -> None:
    """It accepts everything, and answers nothing: sessions build, or the server is stopped, or all processes are."""
    node.mute_until = cluster.now + 10 * fault.size**2 * cluster.scenario.options.connect_timeout
    kind = fault.pick % 3
    node.is_building, node.has_mute_sessions = kind == 0, kind != 1
    for worker in cluster.alive if kind == 2 else []:
        if worker.node is node:
            worker.hung_until = max(worker.hung_until, node.mute_until)


# Ranks


def _pause(cluster: Cluster, rank: Rank, crew: Pass, fault: Fault) -> None:
    rank.paused_until = cluster.now + fault.size**2 * 100 * cluster.scenario.seconds
    if rank.is_waiting:
        rank.later(0.0, rank.consume)


def _choose_batch(rank: Rank, crew: Pass, fault: Fault) -> object:
    """A batch that is still to come; None if there is none."""
    if crew.lengths:
        stream = fault.pick % len(crew.lengths)
        left = crew.lengths[stream] - crew.positions[stream]
        return (stream, crew.positions[stream] + int(fault.size * left)) if left > 0 else None
    left = len(crew.payloads) - crew.num_drawn
    return crew.payloads[crew.num_drawn + int(fault.size * min(left, 10))] if left > 0 else None


def _make_deadly(cluster: Cluster, rank: Rank, crew: Pass, fault: Fault) -> None:
    batch = _choose_batch(rank, crew, fault)
    if batch is not None and batch not in cluster.bad:
        cluster.deadly[batch] = (0.0, 0.01, 0.5, 1.0, 30.0, 100.0)[fault.pick % 6]


def _make_bad(cluster: Cluster, rank: Rank, crew: Pass, fault: Fault) -> None:
    batch = _choose_batch(rank, crew, fault)
    if batch is not None and batch not in cluster.deadly:
        cluster.bad.add(batch)


def _add_node(cluster: Cluster, rank: Rank, crew: Pass, fault: Fault) -> None:
    if len(cluster.nodes) < 2 * len(cluster.scenario.offered) and fault.size < 0.3:
        node = cluster.add_node(1 + fault.pick % 3)
    else:
        nodes = list(cluster.nodes.values())
        node = nodes[fault.pick % len(nodes)]
    crew.driver.nodes_changed([node.name], [])


def _remove_node(cluster: Cluster, rank: Rank, crew: Pass, fault: Fault) -> None:
    nodes = list(cluster.nodes.values())
    node = nodes[int(fault.size * len(nodes))]
    crew.driver.nodes_changed([], [node.name])


def _want(cluster: Cluster, rank: Rank, crew: Pass, fault: Fault) -> None:
    """The loop wants fewer workers, or more."""
    if not crew.lengths:
        most = 1 + int(fault.size * (len(crew.judge.places) + 1))
        crew.driver.feed(lambda engine, _now: engine.crew.use(most))


_WORKER_FAULTS: dict[str, Callable[[Cluster, Worker, Fault], None]] = {
    "kill": _kill,
    "kill while answering": _kill_while_answering,
    "hang": _hang,
    "retire": _retire,
}
_NODE_FAULTS: dict[str, Callable[[Cluster, Node, Fault], None]] = {
    "lose node": _lose_node,
    "drain node": _drain_node,
    "flapping node": _spoil,
    "full node": _spoil,
    "refused forks": _spoil,
    "late answers": _spoil,
    "foreign node": _replace,
    "broken node": _replace,
    "mute node": _mute,
    "raising node": _spoil,
    "exiting node": _spoil,
    "killing node": _spoil,
}
_RANK_FAULTS: dict[str, Callable[[Cluster, Rank, Pass, Fault], None]] = {
    "pause": _pause,
    "bad batch": _make_bad,
    "deadly batch": _make_deadly,
    "add node": _add_node,
    "remove node": _remove_node,
    "want": _want,
    "leave": lambda _cluster, rank, _crew, _fault: rank.leave(),
    "resume": lambda _cluster, rank, _crew, _fault: rank.resume(),
}
