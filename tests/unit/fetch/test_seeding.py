from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data._utils.worker import _generate_state

from rpcdataloader.fetch import seeding
from rpcdataloader.fetch.seeding import get_sample_seed, set_random_seeds

LARGEST = 2**63 - 1


@pytest.fixture(autouse=True)
def _untouched():
    with seeding.generators_restored():
        yield


class Draws(NamedTuple):
    """Raw outputs of the three generators, the lower 31 bits of each: comparable with one another."""

    python: list[int]
    numpy: list[int]
    torch: list[int]


def draw(count=4) -> Draws:
    return Draws(draw_python(random, count), draw_numpy(np.random, count), draw_torch(torch.default_generator, count))


def draw_python(source, count) -> list[int]:
    return [source.getrandbits(32) % 2**31 for _ in range(count)]


def draw_numpy(source, count) -> list[int]:
    return (source.randint(0, 2**32, count, dtype=np.uint32) % 2**31).tolist()


def draw_torch(source, count) -> list[int]:
    return torch.empty(count, dtype=torch.int32).random_(generator=source).tolist()


# Seeds


def test_seeds_are_pinned():
    # Changing these numbers changes every augmentation: the changelog must say so.
    first, another = (
        seeding.derive_seeds(seeding.SAMPLE, 0, 0, 0),
        seeding.derive_seeds(seeding.SAMPLE, LARGEST, 3, 10**9),
    )
    batch = seeding.derive_seeds(seeding.BATCH, 0, 0, 0)
    assert first == (1134789983623107974, 8693072347268702877, 265151668, 941572882)
    assert another == (5495875880838284195, 17922270945573925468, 4294291904, 2269416550)
    assert batch == (5986860245025877345, 4786845041662790429, 1875654636, 3036767808)


def test_seeds_differ_by_base_epoch_position_and_purpose():
    seeds = [
        seeding.derive_seeds(purpose, base, epoch, number)[0]
        for purpose in (seeding.SAMPLE, seeding.BATCH)
        for base in (0, 1, 2, LARGEST)
        for epoch in range(5)
        for number in range(200)
    ]
    assert len(set(seeds)) == len(seeds)


# Seeding the generators


def begin(position=0):
    seeding.begin_sample(seeding.derive_seeds(seeding.SAMPLE, 0, 0, position))


def test_equal_seeds_give_equal_draws_whatever_was_drawn_before():
    begin(5)
    expected = draw()
    # Half of a pair of normal numbers is kept for the next call by all three.
    random.gauss(0, 1)
    np.random.normal()
    torch.randn(1)
    begin(5)
    assert draw() == expected
    begin(5)
    normal = random.gauss(0, 1), np.random.normal(), torch.randn(1).item()
    begin(5)
    assert (random.gauss(0, 1), np.random.normal(), torch.randn(1).item()) == normal


def test_generators_share_no_stream_with_each_other_or_with_one_seeded_by_the_user():
    begin()
    draws = draw(64)
    seed = get_sample_seed()
    own = (
        draw_python(random.Random(seed), 64),
        draw_numpy(np.random.RandomState(seed % 2**32), 64),
        draw_torch(torch.Generator().manual_seed(seed), 64),
    )
    assert own[1] == own[2]  # what makes this test necessary
    numbers = [set(drawn) for drawn in (*draws, own[0], own[1])]
    assert len(set().union(*numbers)) == sum(map(len, numbers))


def test_set_random_seeds_does_what_torch_does_in_its_workers():
    for base_seed, worker_id in ((0, 0), (LARGEST, 3), (2**40 + 17, 64)):
        set_random_seeds(base_seed, worker_id)
        drawn = draw()
        random.seed(base_seed + worker_id)
        torch.manual_seed(base_seed + worker_id)
        np.random.seed(_generate_state(base_seed, worker_id))
        assert drawn == draw()


# The seed of the current sample


def test_sample_seed_is_the_same_throughout_a_sample():
    with seeding.generators_restored():
        seeding.begin_sample((17, 1, 2, 3))
        assert [get_sample_seed(), get_sample_seed()] == [17, 17]
        seeding.begin_sample((18, 1, 2, 3))
        assert get_sample_seed() == 18


def test_sample_seed_is_drawn_from_torch_outside_of_a_sample():
    torch.manual_seed(3)
    seeds = [get_sample_seed() for _ in range(100)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed <= LARGEST for seed in seeds)
    torch.manual_seed(3)
    assert [get_sample_seed() for _ in range(100)] == seeds
