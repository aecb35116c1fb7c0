"""What scripts and notebooks define in ``__main__``, in workers: as in torch's that are forked.

The idioms are in ``tests/support/idioms.py``, each a few lines of one script. A new way to start workers gets a row in
``WAYS``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "idioms.py"

#: How workers are had; ``{}`` is the address of a node server.
WAYS = {
    "node server": "rpc:{}",
    "node server, RPCDataset": "built:{}",
    "this machine": "rpc:local:1",
    "this machine, RPCDataset": "built:local:1",
}

#: Those that every run tries.
QUICK = {"node server"}
SLOW = pytest.mark.slow, pytest.mark.instruments

# Parts of an RPCDataset are not objects of the script.
_NOT_BUILT = {
    "methods of a dataset of which this is a part",
    "what a dataset has in slots, and collate_fn, too",
    "what a dataset has in an OrderedDict, and collate_fn, too",
    "what a dataset has in a deque, and collate_fn, too",
    "what a dataset has in a partial function, and collate_fn, too",
    "a variable of a function that worker_init_fn sets",
}


def run(zygote, how):
    """Both epochs of each idiom."""
    ended = zygote.start(SCRIPT.read_text(), how, ends_quickly=True).wait(120)
    assert ended.status == 0, ended.errors
    return json.loads(ended.output)


def differences(found, expected, but=frozenset()):
    return {
        name: (found[name], expected[name]) for name in expected if name not in but and found[name] != expected[name]
    }


@pytest.fixture(scope="module")
def forked(zygote):
    """In torch's forked workers; one for all, as its end takes longer than the idioms."""
    return run(zygote, "torch:fork")


@pytest.mark.slow
@pytest.mark.instruments
def test_idioms_do_not_meet_in_the_worker_that_they_share(zygote, forked):
    assert differences(run(zygote, "apart:fork"), forked) == {}


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in QUICK else SLOW) for way in WAYS])
def test_idioms_of_scripts_are_as_in_forked_workers(zygote, shared_server, forked, way):
    found = run(zygote, WAYS[way].format(shared_server.address))
    assert len(found) >= 40
    assert differences(found, forked, _NOT_BUILT if way.endswith("RPCDataset") else frozenset()) == {}


def test_idioms_of_scripts_are_so_inline_too_until_epochs_change_what_they_find(zygote, forked):
    found = run(zygote, "rpc:inline")
    first = {name: epochs[0] for name, epochs in found.items()}
    assert differences(first, {name: epochs[0] for name, epochs in forked.items()}) == {}


@pytest.mark.slow
@pytest.mark.instruments
def test_where_torchs_forked_and_spawned_workers_agree_idioms_are_listed(forked):
    """A spawned worker knows nothing of what a script has done since, nor that two of its objects are one."""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), "torch:spawn"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    spawned = json.loads(ended.stdout)
    differing = differences({**forked, **spawned}, forked)
    assert set(differing) == {
        "a constant, changed between epochs",
        "a dict that is changed in place",
        "import __main__",  # in a spawned process, this is another module for a moment
        "a function that is defined again",
        "a table in a class, filled by a constructor",
        "a list in a class, filled by a constructor",
        "an attribute of a class, changed between epochs",
        "a class whose cell is run again",
        "the dataset as a global",
        "a dict that is a global and an attribute",
        "the state of a method's decorator, changed between epochs",
        "a variable that a local class uses, changed between epochs",
        "a global of code that exec runs, changed between epochs",
        "a variable of a function that worker_init_fn sets",
    }
