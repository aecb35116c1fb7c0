"""The benchmark: how fast batches reach a trainer, and what that costs it.

::

    python -m tests.benchmark                        # everything: about 15 minutes on 2 cores
    python -m tests.benchmark --quick                # one short round, to see that it works
    python -m tests.benchmark --workloads float32 --loaders torch,ours-tcp,bare --rounds 5 --json figures.json

It measures and prints, and asserts nothing. Progress goes to standard error, one Markdown table to standard output.

**Loaders**, each with 2 workers: ``ours-tcp`` and ``ours-unix`` (this project, one node server on this host),
``torch`` (``torch.utils.data.DataLoader``), ``original`` (rpcdataloader 0.2.1 from the package index, see
``original.py``) and ``bare`` (two processes that send a ready batch over TCP loopback again and again, received with
``MSG_WAITALL`` into reused buffers: what the sockets of this machine can do).

**Workloads**: see ``workloads.py``. The datasets cost little and the same for everybody; ``jpeg`` does real work.

**Method.** Rounds are interleaved (A B C A B C ...), so that a machine that slows down slows everybody down. Each
measurement is a fresh trainer process with fresh servers, started beforehand and stopped afterwards. The trainer takes
the time to the first batch, from ``iter()`` on; warms up; counts batches for ``--seconds``; then does both again while
it spends 10 ms of CPU time in pure Python per batch, which is what a training step does to the interpreter lock.

**Figures** are medians of the rounds. *CPU s/GB* is user and system time of the trainer process with all its threads,
and without its workers, per 10^9 bytes of batches (where batches are tiny: per batch); in the busy columns the 10 ms
are subtracted. *x torch* is the median of the ratio to torch's loader in the same round. The smallest and the largest
rate of the rounds stand in brackets.

A batch is only received, and not read. torch's workers hand over shared memory, which costs the trainer page
faults only once it is read; ``--copy`` makes the trainer copy each batch to one place, as a copy to a GPU does.

Read ``workloads.py`` and ``loaders.py`` first, then ``trainer.py``.
"""
