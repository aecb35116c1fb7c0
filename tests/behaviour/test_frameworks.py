"""Frameworks that resume by torchdata's StatefulDataLoader save and load as before with our loader in its place.

Each test does as one framework does, after the changes of docs/libraries.md: the import is the first one. Ranks run one
after the other in this process, as launchers would start them, unless a test says that it starts processes.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from abc import ABC, abstractmethod

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, Sampler, SequentialSampler

from rpcdataloader import ResumableDistributedSampler
from rpcdataloader import RPCDataloader as StatefulDataLoader
from rpcdataloader.errors import LocalProtocolError
from tests.support.datasets import Augmented
from tests.support.library import Library
from tests.support.origins import run_ranks

dcp = Library("torch.distributed.checkpoint")
torchdata = Library("torchdata.stateful_dataloader", needs="torchdata")
samplers = Library("torchdata.stateful_dataloader.sampler", needs="torchdata")

pytestmark = pytest.mark.usefixtures("clean_client")


@pytest.fixture(autouse=True)
def nodes(shared_server, monkeypatch):
    """Scripts that do not name the workers find them in the environment."""
    monkeypatch.setenv("RPCDATALOADER_WORKERS", shared_server.address)


def plain(batch):
    return {name: value.tolist() for name, value in batch.items()}


# verl, reinforcement learning: one loader in the driver, a file per step


def train_in_driver(make_loader, folder, last_step):
    """Train for two epochs, from the last step in the folder to this one; returns the batch of each step."""
    loader = make_loader()
    step = max((int(path.name) for path in folder.iterdir()), default=0)
    if step:
        loader.load_state_dict(torch.load(folder / f"{step}", weights_only=False))
    seen = {}
    for _epoch in range(step // len(loader), 2):
        for batch in loader:
            step += 1
            seen[step] = plain(batch)
            torch.save(loader.state_dict(), folder / f"{step}")
            if step == last_step:
                return seen
    return seen


SAMPLERS = {
    "theirs": lambda dataset: samplers.RandomSampler(dataset, generator=torch.Generator().manual_seed(1)),
    "torch's": lambda dataset: torch.utils.data.RandomSampler(dataset, generator=torch.Generator().manual_seed(1)),
    "in order": SequentialSampler,
}


def make_for_driver(kind, sampler, **options):
    dataset = Augmented(11)
    return kind(
        dataset=dataset, batch_size=2, drop_last=True, collate_fn=torch.utils.data.default_collate,
        sampler=SAMPLERS[sampler](dataset), **options,
    )  # fmt: skip


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_driver_goes_on_from_the_file_of_the_last_step(tmp_path, sampler):
    def train(name, last_step):
        (tmp_path / name).mkdir(exist_ok=True)
        torch.manual_seed(2)
        make = functools.partial(make_for_driver, StatefulDataLoader, sampler, num_workers=2)
        return train_in_driver(make, tmp_path / name, last_step)

    whole = train("whole", 10)
    assert len(whole) == 10
    parts = [train("parts", last_step) for last_step in (2, 4, 7, 10)]
    assert [list(part) for part in parts] == [[1, 2], [3, 4], [5, 6, 7], [8, 9, 10]]
    together = {step: batch for part in parts for step, batch in part.items()}
    assert {step: batch["index"] for step, batch in together.items()} == {
        step: batch["index"] for step, batch in whole.items()
    }
    # The random numbers of an epoch are those with which it began, in a job that had the same ones then.
    assert [together[step] for step in range(1, 6)] == [whole[step] for step in range(1, 6)]


@pytest.mark.parametrize("last_step", [3, 5, 6])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_driver_has_the_steps_that_it_has_with_their_loader(tmp_path, last_step):
    """Also those that verl leaves out: after the last step of an epoch, its state gives an empty one."""
    found = []
    for kind in StatefulDataLoader, torchdata.StatefulDataLoader:
        folder = tmp_path / kind.__module__
        folder.mkdir()
        make = functools.partial(make_for_driver, kind, "theirs", num_workers=0)
        steps = train_in_driver(make, folder, last_step) | train_in_driver(make, folder, 10)
        found.append([(step, batch["index"]) for step, batch in steps.items()])
    assert found[0] == found[1]


class Curriculum(Sampler):
    """Goes on from one level to the next when the driver has trained with a batch."""

    def __init__(self):
        self.level = 0

    def __iter__(self):
        for number in range(4):
            yield 10 * self.level + number

    def update(self):
        self.level += 1


class SavedCurriculum(Curriculum):
    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


@pytest.mark.parametrize(
    ("kind", "expected"), [(Curriculum, [0, 11, 22, 33]), (SavedCurriculum, [0, 1, 12, 23])], ids=["", "with a state"]
)
def test_curriculum_hears_of_a_batch_before_the_next_one_is_drawn_or_after_it_with_a_state(kind, expected):
    sampler, seen = kind(), []
    for (index,) in StatefulDataLoader(range(100), 1, sampler=sampler, workers="inline"):
        seen.append(int(index))
        sampler.update()
    assert seen == expected


# verl, supervised: a sampler per data-parallel rank, and its file


def train_ranks(folder, world_size, kind, last_step, as_rank):
    """Train with batches of 8 in all, from the last step in the folder to this one; returns each rank's batches."""
    begin, seen = max((int(path.name) for path in folder.iterdir()), default=0), []
    for rank in range(world_size):
        as_rank(rank, world_size)
        torch.manual_seed(2 + rank)
        dataset, step = Augmented(50), begin
        sampler = kind(dataset, shuffle=True, num_replicas=world_size, rank=rank, drop_last=True)
        loader = StatefulDataLoader(
            dataset=dataset, batch_size=8 // world_size, sampler=sampler, num_workers=8, pin_memory=False,
            drop_last=True, pin_memory_device="cpu",
        )  # fmt: skip
        if begin:
            path = folder / f"{begin}" / f"data_{rank}.pt"
            path = path if path.exists() else path.with_name("data_0.pt")
            loader.load_state_dict(torch.load(path, weights_only=False))
        seen.append([])
        for epoch in range(begin // len(loader), 2):
            sampler.set_epoch(epoch=epoch)
            for batch in loader:
                step += 1
                seen[-1].append(plain(batch))
                if step == last_step:
                    break
            if step == last_step:
                break
        (folder / f"{step}").mkdir(exist_ok=True)
        torch.save(loader.state_dict(), folder / f"{step}" / f"data_{rank}.pt")
    return seen


def test_ranks_go_on_from_their_files(tmp_path, as_rank):
    def train(name, last_step):
        (tmp_path / name).mkdir(exist_ok=True)
        return train_ranks(tmp_path / name, 2, DistributedSampler, last_step, as_rank)

    whole = train("whole", 12)
    parts = [train("parts", last_step) for last_step in (2, 4, 12)]
    for rank in range(2):
        found = list(itertools.chain.from_iterable(part[rank] for part in parts))
        assert len(found) == 12
        assert [batch["index"] for batch in found] == [batch["index"] for batch in whole[rank]]
        assert found[:6] == whole[rank][:6]


@pytest.mark.parametrize("world_sizes", [(4, 2), (2, 4)])
def test_ranks_go_on_as_another_number_of_them_with_our_sampler(tmp_path, as_rank, world_sizes):
    before, after = world_sizes
    begun = train_ranks(tmp_path, before, ResumableDistributedSampler, 2, as_rank)
    rest = train_ranks(tmp_path, after, ResumableDistributedSampler, 6, as_rank)
    assert [len(batches) for batches in begun + rest] == [2] * before + [4] * after
    found = [index for batches in begun + rest for batch in batches for index in batch["index"]]
    assert len(found) == len(set(found)) == 6 * 8


def test_ranks_do_not_go_on_as_another_number_of_them_with_the_sampler_of_torch(tmp_path, as_rank):
    train_ranks(tmp_path, 4, DistributedSampler, 2, as_rank)
    with pytest.raises(ValueError, match=r"rank 0 of 4, and here is .* rank 0 of 2: .*ResumableDistributedSampler"):
        train_ranks(tmp_path, 2, DistributedSampler, 6, as_rank)


# prime-rl: packed documents, a state of the stream, and a file per rank beside the distributed checkpoint


class Documents(IterableDataset):
    """Documents without end, of which each rank has its part; the state is the position of all ranks."""

    def __init__(self):
        self.step = 0
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def __iter__(self):
        while True:
            self.step += 1
            if self.step % self.world_size == self.rank:
                yield [self.step] * (self.step % 5 + 1)


class Rows(IterableDataset):
    """Rows of as many whole documents as fit; the one that did not waits for the next row, also in a state."""

    def __init__(self, documents, length):
        self.documents, self.length, self.waiting = documents, length, None

    def state_dict(self):
        return {"documents": self.documents.state_dict(), "waiting": self.waiting}

    def load_state_dict(self, state):
        self.documents.load_state_dict(state["documents"])
        self.waiting = state["waiting"]

    def __iter__(self):
        row, self.waiting = self.waiting or [], None
        for document in self.documents:
            if len(row) + len(document) > self.length:
                self.waiting = document
                yield torch.tensor(row)
                row, self.waiting = self.waiting, None
            else:
                row = row + document


def first(samples):
    (sample,) = samples
    return sample.tolist()


def make_rows():
    return StatefulDataLoader(Rows(Documents(), 9), batch_size=1, collate_fn=first, num_workers=1)


def test_stream_goes_on_from_the_file_of_the_rank(tmp_path, as_rank):
    for rank in range(2):
        as_rank(rank, 2)
        path = tmp_path / f"rank_{rank}.pt"
        whole = list(itertools.islice(make_rows(), 12))
        assert len({document for row in whole for document in row}) > 20
        seen = []
        for num_steps in 3, 1, 8:
            loader = make_rows()
            before = loader.state_dict()  # which is logged, before the first pass
            if seen:
                loader.load_state_dict(torch.load(path, weights_only=False))
                assert loader.state_dict() != before
            rows = iter(loader)
            seen += [next(rows) for _ in range(num_steps)]
            torch.save(loader.state_dict(), path)
        assert seen == whole
    # With more ranks, the script falls back to the file of rank 0, whose documents another rank may have had.
    as_rank(2, 3)
    with pytest.raises(ValueError, match=r"rank 0 of 2, and here is .* rank 2 of 3: .* each rank has streams of its"):
        make_rows().load_state_dict(torch.load(tmp_path / "rank_0.pt", weights_only=False))


# TorchTitan: a subclass whose state names its data-parallel rank, in a distributed checkpoint


@functools.cache
def loader_of_rank():
    """The class, which is made where the library is imported."""

    class Checkpointed(dcp.stateful.Stateful, ABC):
        """What the trainer asks of any loader."""

        @abstractmethod
        def __iter__(self): ...

    class LoaderOfRank(StatefulDataLoader, Checkpointed):
        """Saves its rank's state as bytes, under a name that no other rank has."""

        def __init__(self, dataset, rank, world_size, **options):
            self.name, self.world_size = f"rank {rank}", world_size
            super().__init__(dataset, **options)

        def state_dict(self):
            return {self.name: pickle.dumps(super().state_dict()), "world_size": self.world_size}

        def load_state_dict(self, state):
            assert state["world_size"] == self.world_size
            super().load_state_dict(pickle.loads(state[self.name]))

    return LoaderOfRank


def train_as_rank(folder):
    """What each process of a job finds: the rows of an uninterrupted pass, and of one that is resumed twice."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world_size)

    def make():
        return loader_of_rank()(Rows(Documents(), 9), rank, world_size, batch_size=1, collate_fn=first, num_workers=1)

    whole = list(itertools.islice(make(), 10))
    seen, loader = [], make()
    for step, after_iter in (2, False), (5, False), (10, True):
        rows = iter(loader)
        seen += [next(rows) for _ in range(step - len(seen))]
        dcp.save({"dataloader": loader, "step": step}, checkpoint_id=f"{folder}/{step}")
        loader = make()
        if after_iter:
            next(rows := iter(loader))
        states = {"dataloader": loader, "step": 0}
        dcp.load(states, checkpoint_id=f"{folder}/{step}")
        assert states["step"] == step
        if after_iter:
            with pytest.raises(LocalProtocolError, match="load_state_dict"):
                next(rows)
    seen += itertools.islice(loader, 2)
    dist.destroy_process_group()
    return {"whole": whole, "seen": seen, "after": list(itertools.islice(make(), 12))}


def test_subclass_goes_on_in_the_processes_of_a_job_from_a_distributed_checkpoint(zygote, tmp_path):
    ranks = run_ranks(zygote, train_as_rank, 2, tmp_path)
    for found in ranks:
        assert found["seen"] == found["after"]
        assert found["seen"][:10] == found["whole"]
    assert not {document for row in ranks[0]["seen"] for document in row} & {
        document for row in ranks[1]["seen"] for document in row
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint_of_a_loader_itself_is_refused_where_it_would_begin_anew(tmp_path):
    """It is loaded into the state of a loader that has no pass yet, which has few keys."""

    def checkpoint(function, name, loader):
        function({"dataloader": loader}, checkpoint_id=tmp_path / name)

    loader = make_for_driver(StatefulDataLoader, "in order")
    checkpoint(dcp.save, "before", loader)
    checkpoint(dcp.load, "before", loader)
    for _batch, _number in zip(loader, range(2), strict=False):
        pass
    checkpoint(dcp.save, "within", loader)
    with pytest.raises(ValueError, match=r"only a part of a state, .*: save pickle\.dumps\(loader\.state_dict\(\)\)"):
        checkpoint(dcp.load, "within", make_for_driver(StatefulDataLoader, "in order"))
