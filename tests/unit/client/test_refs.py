from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest

from rpcdataloader.client.worker import DatasetRef, RRef
from rpcdataloader.errors import LocalProtocolError
from rpcdataloader.wire.pickling import dumps


class Owner:
    name = "worker 3 on node07:6543"
    is_usable = True


@pytest.fixture
def released():
    return []


@pytest.fixture
def ref(released):
    return RRef(Owner(), 7, released.append)


def test_reference_tells_what_it_is(ref):
    assert repr(ref) == "RRef(7 in worker 3 on node07:6543)"
    assert (ref.handle, ref.owner.name) == (7, "worker 3 on node07:6543")


def test_last_reference_releases_the_handle_once(released):
    ref = RRef(Owner(), 7, released.append)
    also = {"ref": [ref]}
    del ref
    assert released == []
    del also
    assert released == [7]
    gc.collect()
    assert released == [7]


def test_references_of_one_object_release_their_own_handles(released):
    refs = [RRef(Owner(), handle, released.append) for handle in range(5)]
    del refs[1::2]
    assert sorted(released) == [1, 3]


def test_copies_are_the_reference_itself(ref, released):
    assert copy.copy(ref) is ref
    assert copy.deepcopy({"key": [ref]})["key"][0] is ref
    assert released == []


def test_release_runs_in_the_thread_that_collects(released):
    cycle = [RRef(Owner(), 7, lambda handle: released.append((handle, threading.get_ident())))]
    cycle.append(cycle)
    del cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert [handle for handle, _thread in released] == [7]


@pytest.mark.parametrize("serialise", [pickle.dumps, dumps], ids=["pickle", "requests"])
def test_references_cannot_be_pickled_on_their_own(ref, serialise):
    with pytest.raises(LocalProtocolError, match=r"RRef\(7 in worker 3 on node07:6543\) has a meaning only in"):
        serialise([ref])
    with pytest.raises(LocalProtocolError, match="a dataset reference has a meaning only in calls"):
        serialise({"dataset": DatasetRef(1)})


def test_references_take_no_attributes(ref):
    with pytest.raises(AttributeError):
        ref.name = "mine"
