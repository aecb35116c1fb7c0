"""Batches of equal cost: what all ranks together get, and how far their costs differ."""

from __future__ import annotations

import collections
import copy
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from torch.utils.data import IterableDataset

import rpcdataloader
from rpcdataloader import CostBatchSampler, RPCDataloader, RPCDataset, measure_costs

MAX_COST = 16_384


def lengths(number, seed=0):
    """Lengths of texts, as they are often distributed."""
    return np.clip(np.random.default_rng(seed).lognormal(5, 1, number), 16, 1024).astype(np.int64)


def ranks(costs, num_replicas, max_cost=MAX_COST, **options):
    return [
        CostBatchSampler(costs, max_cost, num_replicas=num_replicas, rank=rank, **options)
        for rank in range(num_replicas)
    ]


def steps_of(samplers):
    """The batches of all ranks, step by step."""
    return list(zip(*samplers, strict=True))


def samples_of(steps):
    return sorted(index for step in steps for batch in step for index in batch)


def cost_of(costs, batch, padded=True):
    chosen = costs[np.array(batch)]
    return chosen.max() * len(batch) if padded else chosen.sum()


@pytest.mark.parametrize(("num_ranks", "number"), [(2, 100_000), (8, 100_000), (64, 40_000)])
@pytest.mark.parametrize("padded", [True, False])
def test_all_ranks_have_batches_of_equal_cost_at_each_step(num_ranks, number, padded):
    costs = lengths(number)
    steps = steps_of(ranks(costs, num_ranks, padded=padded))
    table = np.array([[cost_of(costs, batch, padded) for batch in step] for step in steps])
    assert samples_of(steps) == list(range(len(costs)))
    assert table.max() <= MAX_COST
    assert (table.max(1) / table.mean(1)).mean() <= 1.05
    assert table.sum() <= 1.1 * costs.sum()  # at most a tenth is padding
    # The budget is used: but for the last step, and the last batches of the windows.
    assert table.mean() >= 0.9 * MAX_COST


OPTIONS = {
    "costs": st.lists(st.integers(1, 50) | st.sampled_from([20, 30]), min_size=1, max_size=60).map(np.array),
    "num_replicas": st.integers(1, 8),
    "padded": st.booleans(),
    "window": st.integers(1, 70),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "seed": st.integers(0, 2**70),
}


@settings(max_examples=80, deadline=None)
@given(max_cost=st.integers(50, 120), epoch=st.integers(0, 3), **OPTIONS)
@example(  # two of a pair use the budget up, and two of a kind do not
    costs=np.array([60, 40] * 7),
    num_replicas=8,
    max_cost=100,
    epoch=0,
    padded=False,
    window=2,
    shuffle=False,
    drop_last=False,
    seed=0,
)
def test_every_rank_plans_the_same(costs, num_replicas, max_cost, epoch, **options):
    samplers = ranks(costs, num_replicas, max_cost, **options)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    promised = {len(sampler) for sampler in samplers}
    steps = steps_of(samplers)
    assert promised == {len(steps)}
    assert all(cost_of(costs, batch, options["padded"]) <= max_cost for step in steps for batch in step)
    counts = collections.Counter(samples_of(steps))
    if options["drop_last"]:
        assert set(counts.values()) <= {1}
    else:
        assert counts.keys() == set(range(len(costs)))
        # Only where there are fewer samples than ranks, in the last step.
        assert set(counts.values()) == {1} or len(set(itertools.chain(*steps[-1]))) < num_replicas


@settings(max_examples=60, deadline=None)
@given(data=st.data(), max_cost=st.integers(50, 120), **OPTIONS)
def test_other_ranks_continue_with_each_sample_once(data, costs, num_replicas, max_cost, **options):
    """Also a second time, from the state of any rank."""
    options["drop_last"] = False
    seen, samplers, padded = [], ranks(costs, num_replicas, max_cost, **options), set()
    for _ in range(3):
        steps = steps_of(copy.deepcopy(samplers))
        number = data.draw(st.integers(0, len(steps)))
        states = []
        for sampler in samplers:
            iterator = iter(sampler)
            for _ in range(number):
                next(iterator)
            states.append(json.loads(json.dumps(sampler.state_dict())))
        assert states.count(states[0]) == len(states)
        seen += samples_of(steps[:number])
        if number == len(steps):  # of fewer samples than ranks, some are repeated
            padded |= {index for index, count in collections.Counter(samples_of(steps[-1:])).items() if count > 1}
        num_replicas = data.draw(st.integers(1, 5))
        samplers = ranks(costs, num_replicas, max_cost, **{**options, "seed": 0, "shuffle": True})
        for sampler in samplers:
            sampler.load_state_dict(states[0])
    steps = steps_of(samplers)
    padded |= {index for index, count in collections.Counter(samples_of(steps[-1:])).items() if count > 1}
    seen += samples_of(steps)
    assert set(seen) == set(range(len(costs)))
    assert {index for index, count in collections.Counter(seen).items() if count > 1} <= padded


def test_a_new_epoch_begins_at_its_start():
    sampler, other = ranks(lengths(2000), 1) + ranks(lengths(2000), 1)
    next(iter(sampler))
    other.load_state_dict(sampler.state_dict())
    assert len(other) == len(sampler) - 1
    other.set_epoch(1)
    assert len(other) == len(sampler)
    running = iter(sampler)
    next(running)
    sampler.set_epoch(1)
    next(running)
    assert sampler.state_dict()["epoch"] == 0, "of the pass that runs"


def test_a_pass_that_runs_or_was_left_changes_neither_length_nor_the_next_pass(tmp_path):
    (loader,) = make_loaders(tmp_path / "log", 1)
    whole, length = list(loader), len(loader)
    assert length == len(whole) > 3
    batches = iter(loader)
    assert [next(batches) for _ in range(2)] == whole[:2]
    assert len(loader) == len(loader.batch_sampler) == length
    assert list(loader) == whole
    state = loader.state_dict()
    (loader,) = make_loaders(tmp_path / "log", 1)
    loader.load_state_dict(state)
    assert list(loader) == whole
    loader.load_state_dict(state)
    loader.batch_sampler.set_epoch(1)
    assert list(loader) == list(loader) != whole


def test_samples_meet_others_in_the_next_epoch():
    (sampler,) = ranks(lengths(5_000), 1, window=500)
    met = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        met.append({pair for batch in sampler for pair in itertools.combinations(sorted(batch), 2)})
    assert len(met[0] & met[1]) < 0.1 * len(met[0])


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ([], {}, r"one number per sample, but their shape is \(0,\)"),
        ([[1, 2]], {}, r"one number per sample, but their shape is \(1, 2\)"),
        ([1, -2], {}, "that of sample 1 is -2.0"),
        ([1, 0], {}, "that of sample 1 is 0.0"),
        ([1, float("nan")], {}, "that of sample 1 is nan"),
        ([1, 30], {}, "sample 1 costs 30 alone, which is above max_cost=20"),
        ([1], {"max_cost": float("inf")}, "max_cost must be finite, but is inf"),
        ([1], {"window": 0}, "window must be at least 1, but is 0"),
        ([1], {"num_replicas": 2, "rank": 2}, "rank must be between 0 and 1, but is 2"),
        ([1], {"seed": -1}, "seed must be at least 0, but is -1"),
    ],
)
def test_bad_input_is_refused(costs, options, message):
    with pytest.raises(ValueError, match=message):
        CostBatchSampler(costs, **{"max_cost": 20, **options})


def test_a_state_is_plain_numbers_where_those_of_numpy_were_given():
    number = np.int64(1)
    sampler = CostBatchSampler(lengths(100), np.int64(2000), num_replicas=number, rank=number - 1, seed=number)
    sampler.set_epoch(number)
    next(iter(sampler))
    assert json.loads(json.dumps(sampler.state_dict()))["epoch"] == 1


def test_rounding_leaves_no_budget_unused():
    """Three times 0.1 is above 0.3, for a computer."""
    for padded in True, False:
        (sampler,) = ranks(np.full(90, 0.1), 1, max_cost=0.3, padded=padded, window=90)
        assert {len(batch) for batch in sampler} == {3}


def test_state_belongs_to_its_costs_and_its_budget_whether_that_is_an_integer_or_a_float():
    (one,), (other,) = ranks(lengths(100), 1, max_cost=2000), ranks(lengths(100), 1, max_cost=2000.0)
    other.load_state_dict(one.state_dict())
    (stranger,) = ranks(lengths(100, seed=1), 1, max_cost=2000)
    with pytest.raises(ValueError, match="belongs to other costs, or to another max_cost"):
        stranger.load_state_dict(one.state_dict())


class Texts:
    """Counts in a file how often it was loaded."""

    length = 700

    def __init__(self, log):
        self.log = log

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 0:
            with open(self.log, "a") as file:
                file.write("loaded\n")
        return "x" * (index + 1)


@pytest.mark.parametrize("remote", [False, True])
def test_costs_are_measured_once(tmp_path, remote):
    log, drawn = tmp_path / "log", set()
    for _ in range(2):
        torch.manual_seed(0)
        dataset = RPCDataset("inline", Texts, log) if remote else Texts(log)
        found = measure_costs(dataset, len, cache=tmp_path / "costs", workers=None if remote else "inline")
        assert found.tolist() == list(range(1, 701))
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 1, "the script draws the same, whether the costs were known or not"
    assert log.read_text() == "loaded\n"
    assert len(list((tmp_path / "costs").iterdir())) == 1
    measure_costs(dataset, str.__len__, cache=tmp_path / "costs", workers=None if remote else "inline")
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_costs_are_measured_again_after_a_change_of_the_dataset(tmp_path):
    dataset = RPCDataset("local:1", Texts, tmp_path / "log")
    for length in (3, 3, 2):
        dataset.length = length
        assert measure_costs(dataset, len, cache=tmp_path / "costs").tolist() == list(range(1, length + 1))
    assert (tmp_path / "log").read_text() == "loaded\nloaded\n"
    assert len(list((tmp_path / "costs").iterdir())) == 2


EDITED = """
from rpcdataloader import RPCDataset, measure_costs

class Numbers:
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return index + SAMPLE

def cost(sample):
    return sample * COST

for dataset in Numbers(), RPCDataset("inline", Numbers):
    workers = "inline" if isinstance(dataset, Numbers) else None
    print(measure_costs(dataset, cost, cache="costs", workers=workers).tolist())
"""


def test_costs_are_measured_again_after_an_edit_of_the_script(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(rpcdataloader.__file__).parent.parent)}
    for sample, cost in (1, 1), (1, 2), (3, 2), (1, 1):
        (tmp_path / "script.py").write_text(EDITED.replace("SAMPLE", str(sample)).replace("COST", str(cost)))
        found = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, check=True, capture_output=True, text=True, env=environment
        )
        expected = [float(cost * (index + sample)) for index in range(3)]
        assert found.stdout.splitlines() == [str(expected)] * 2
    assert len(list((tmp_path / "costs").iterdir())) == 3


@pytest.mark.parametrize(
    "options", [{"on_error": "skip"}, {"in_order": False}, {"drop_last": True}, {"shuffle": True}, {"sampler": [1, 0]}]
)
def test_options_that_would_mix_up_costs_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=f"every sample, in the dataset's order: leave out {next(iter(options))}"):
        measure_costs(Texts(tmp_path / "log"), len, workers="inline", **options)
    assert not (tmp_path / "log").exists()


class Stream(IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        raise AssertionError("iterated over")


def test_a_stream_has_no_costs(tmp_path):
    with pytest.raises(TypeError, match="costs are measured of a map-style dataset"):
        measure_costs(Stream(), len, cache=tmp_path)


@pytest.mark.parametrize("cost", [None, [1.0, 2.0], "much"])
def test_a_cost_that_is_no_number_is_an_error_with_its_sample(tmp_path, cost):
    with pytest.raises((TypeError, ValueError)) as caught:
        measure_costs(["one", "two"], lambda text: cost if text == "two" else 1.0, workers="inline", cache=tmp_path)
    if sys.version_info >= (3, 11):
        assert "cost of the sample with index 1" in caught.value.__notes__
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_that_loads_too_few_samples_is_refused(tmp_path):
    class Gaps(Texts):
        def __getitems__(self, indices):
            return [str(index) for index in indices if index]

    with pytest.raises(ValueError, match="has 700 samples, but 699 were loaded"):
        measure_costs(Gaps(tmp_path / "log"), len, workers="inline")


def cost_but_for_301(text):
    return len(text) if len(text) != 301 else {}["cost"]


@pytest.mark.parametrize("workers", [None, "inline", "local:1"])
def test_an_exception_of_the_cost_function_names_the_sample(tmp_path, workers):
    with pytest.raises(KeyError, match="cost") as caught:
        measure_costs(Texts(tmp_path / "log"), cost_but_for_301, workers=workers)
    if sys.version_info >= (3, 11):
        assert "cost of the sample with index 300" in caught.value.__notes__


class Counted(Texts):
    """Samples that know how many of them there are at a time."""

    alive = most = 0

    def __getitem__(self, index):
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        return Sample()


class Sample:
    def __del__(self):
        Counted.alive -= 1


def test_few_samples_are_in_memory_at_a_time(tmp_path):
    measure_costs(Counted(tmp_path / "log"), lambda _sample: 1, workers="inline")
    assert Counted.most <= 32


def make_loaders(log, num_ranks, **options):
    return [
        RPCDataloader(Texts(log), batch_sampler=sampler, collate_fn=list, workers="inline", **options)
        for sampler in ranks(np.arange(1, 701), num_ranks, 5000)
    ]


def test_loaders_of_other_ranks_continue_within_an_epoch(tmp_path):
    whole = steps_of(make_loaders(tmp_path / "log", 2))
    loaders = make_loaders(tmp_path / "log", 2)
    iterators = [iter(loader) for loader in loaders]
    begun = [tuple(next(iterator) for iterator in iterators) for _ in range(3)]
    state = json.loads(json.dumps(loaders[1].state_dict()))
    again, others = make_loaders(tmp_path / "log", 2), make_loaders(tmp_path / "log", 3)
    for loader in again + others:
        loader.load_state_dict(state)
    assert begun + steps_of(again) == whole
    texts = itertools.chain(*itertools.chain(*begun, *steps_of(others)))
    assert sorted(map(len, texts)) == list(range(1, 701))


def test_ranks_out_of_step_cannot_continue_as_others(tmp_path):
    loader, _other = make_loaders(tmp_path / "log", 2, in_order=False)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    (loader,) = make_loaders(tmp_path / "log", 1)
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="save a state on each rank"):
        next(iter(loader))
