from __future__ import annotations

import numpy as np

from rpcdataloader.loader.tasks import TaskSource


def numbered(source):
    return [(task.indices, task.position, task.number) for task in source]


def test_tasks_are_numbered_by_batch_and_by_their_first_sample():
    source = TaskSource(iter([[4, 5], [], (6,), [7]]), auto_collation=True, number=3, position=10)
    assert numbered(source) == [([4, 5], 10, 3), ([], 12, 4), ((6,), 12, 5), ([7], 13, 6)]


def test_without_batches_every_index_is_a_task_as_it_is():
    source = TaskSource(iter([4, (5, 6), [7]]), auto_collation=False)
    assert numbered(source) == [(4, 0, 0), ((5, 6), 1, 1), ([7], 2, 2)]


def test_batches_of_any_iterable_become_lists():
    batches = [range(2), np.arange(2), (number for number in (0, 1))]
    assert [task.indices for task in TaskSource(iter(batches), auto_collation=True)] == [[0, 1]] * 3


def test_batches_that_are_left_out_still_count():
    source = TaskSource(iter([[1], [2, 3], [4], [5]]), auto_collation=True, leave_out={1: None, 3: None})
    assert numbered(source) == [([1], 0, 0), ([4], 3, 2)]
