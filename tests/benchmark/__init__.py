"""The benchmark: how fast batches reach a trainer, and what that costs it.

::

    python -m tests.benchmark                        # what is claimed of our loader: about 11 minutes on 2 cores
    python -m tests.benchmark --quick                # one short round, to see that it works
    python -m tests.benchmark --workloads float32 --loaders torch ours-tcp bare --rounds 5
    python -m tests.benchmark --workloads jpeg --loaders torch torch-malloc ours-local --jpegs FOLDER
    python -m tests.benchmark.startup                # how passes begin, and what idle workers occupy
    python -m tests.benchmark.scale                  # how costs grow with workers

It measures and prints, and asserts nothing, but with ``--check``: see ``claims.py``. Progress goes to standard error,
Markdown tables to standard output.

**Loaders**, each with 2 workers: ``ours-tcp`` (this project, a node server on this host), ``ours-local`` (with workers
of this machine), ``torch`` (``torch.utils.data.DataLoader``), ``torch-malloc`` (the same, whose processes keep freed
memory as our workers do, by two variables of the environment), ``original`` (rpcdataloader 0.2.1 from the package
index, see ``original.py``), ``bare`` and ``bare-made`` (what the sockets of this machine can do with the same bytes,
see ``bare.py``) and ``ready`` (a list of ready batches, which only a busy trainer is measured with).

**Workloads**: see ``workloads.py``. The datasets cost little and the same for everybody; ``jpeg`` does real work.

**Method.** Rounds are interleaved (A B C A B C ...), so that a machine that slows down slows everybody down. Each
measurement is a fresh trainer process with fresh servers, started beforehand and stopped afterwards. The trainer takes
the time to the first batch, from ``iter()`` on; warms up; counts batches for ``--seconds``; then does both again while
it computes in pure Python between batches, which is what a training step does to the interpreter lock. That is a fixed
amount of work, the same for all: what takes 10 ms of CPU time while nobody disturbs.

**Figures** are medians of the rounds, with the smallest and the largest rate in brackets. *CPU s/GB* is user and system
time of the trainer process with all its threads, without its workers and without the steps that it computes, per 10^9
bytes of batches (where batches are tiny: per batch). *thread CPU ms/step*: CPU time per batch of the thread that
computes and takes batches. *x torch* and the like: the median of the ratio to that loader in the same round; *x bare*
is to ``bare-made``, *x malloc* to ``torch-malloc``, *CPU x bare* to ``bare``, *step x ready* compares the CPU time per
step with that of ``ready``.

A batch is only received, and not read. torch's workers hand over shared memory, which costs the trainer page
faults only once it is read.
"""
