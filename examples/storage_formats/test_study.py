"""The study of storage formats, small: a run from end to end, and storages that fail."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("boto3")
pytest.importorskip("crc32c")
pytest.importorskip("matplotlib")
pytest.importorskip("tfrecord")
pytest.importorskip("webdataset")

from examples.storage_formats import mount
from examples.storage_formats.__main__ import node_servers
from examples.storage_formats.errors import SampleError, UnavailableError
from examples.storage_formats.plan import Format, Link
from examples.storage_formats.proxy import Proxy
from examples.storage_formats.readers import make_dataset
from examples.storage_formats.samples import image_key, shard_key
from examples.storage_formats.storage import Location, get_client
from examples.storage_formats.store import BUCKET, Store, environment, running
from examples.storage_formats.writing import write_samples
from rpcdataloader import RPCDataloader, RPCDataset
from rpcdataloader.client import client as pool
from tests.conftest import TIMEOUT_SCALE, is_running, wait_until

ROOT = Path(__file__).parents[2]
NUMBER, SHARD = 80, 40
FORMATS = [Format("objects"), Format("threads"), Format("webdataset", SHARD), Format("tfrecord", SHARD)]

pytestmark = pytest.mark.study


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with running(Store(folder / "data", folder / "log")) as store:
        yield store


@pytest.fixture(scope="module")
def samples(store):
    """Eighty samples of 60 kB; gives their location and their manifest."""
    location = Location(store.endpoint, BUCKET, "samples/")
    return location, write_samples(location, NUMBER, 60e3, [SHARD])


@pytest.fixture
def servers(store, tmp_path):  # noqa: ARG001  # its credentials are inherited
    with environment(PYTHONPATH=str(ROOT)), node_servers(4, tmp_path) as addresses:
        yield addresses
        pool.close_client()


@pytest.fixture
def damaged(samples):
    """``damaged(key, change)`` changes an object for the test: ``change`` makes another content of it, or None."""
    location, _ = samples
    client, before = get_client(location.endpoint), {}

    def damage(key, change):
        where = {"Bucket": location.bucket, "Key": location.prefix + key}
        before[where["Key"]] = client.get_object(**where)["Body"].read()
        after = change(before[where["Key"]])
        if after is None:
            client.delete_object(**where)
        else:
            client.put_object(**where, Body=after)
        return location.url(key)

    yield damage
    for key, content in before.items():
        client.put_object(Bucket=location.bucket, Key=key, Body=content)


def labels_of(batches):
    return [label for batch in batches for label in batch.label.tolist()]


def find_left_behind(folder):
    """Processes, mounts and files of a command whose temporary folder was in ``folder``."""
    left = [str(path) for path in folder.glob("storage-formats-*")]
    left += [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    mark = f"TMPDIR={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0") and is_running(int(process.name)):
                left.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return left


def start_study(folder, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "examples.storage_formats", *options, "--output", str(folder / "result")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(240)
def test_quick_study_measures_every_format_and_leaves_nothing(tmp_path):
    with start_study(tmp_path, "--quick") as process:
        output, errors = process.communicate(timeout=200 * TIMEOUT_SCALE)
    assert process.returncode == 0, errors
    result = json.loads((tmp_path / "result" / "storage-formats.json").read_text())
    through_mount = 0 if mount.why_not() else 2
    assert len(result["rows"]) == 8 + through_mount
    assert {row["ranks"] for row in result["rows"]} == {2}
    for row in result["rows"]:
        assert row["num_samples"] == NUMBER
        assert 0 < row["samples_per_second"] == NUMBER / row["seconds"]
        assert 0 < row["waiting"] < 1
        assert 0 < row["reads"] < 64
        assert row["step"] == 0.02
        assert row["measured_step"] > 0.005
    table = (tmp_path / "result" / "storage-formats.md").read_text()
    assert table in output
    assert "| this loader, 4 | 80 |" in table
    assert shlex.join(result["command"].split()[1:2]) in table
    assert (tmp_path / "result" / "storage-formats.svg").read_text().startswith("<?xml")
    assert find_left_behind(tmp_path) == []


@contextlib.contextmanager
def endless_study(folder):
    """A command that is measuring, with a store, node servers, and a mount where there can be one."""
    options = ["--quick", "--ranks", "1", "--loaders", "torch:2", "rpc:4", "--formats", "files", "objects"]
    endless = ["--samples-per-worker", "100000", "--longest-epoch", "100000"]
    with start_study(folder, *options, *endless) as process:
        wait_until(lambda: "storage_formats.train" in str(find_left_behind(folder)), 120)
        yield process


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(number, tmp_path):
    with endless_study(tmp_path) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60 * TIMEOUT_SCALE)
    assert process.returncode == 128 + number, errors
    assert find_left_behind(tmp_path) == []
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("sample_format", FORMATS, ids=str)
def test_each_sample_comes_once_with_its_image(sample_format, samples, servers):
    location, manifest = samples
    dataset = RPCDataset(servers, make_dataset, location, manifest, sample_format, NUMBER, None)
    batches = list(RPCDataloader(dataset, batch_size=16, shuffle=None if sample_format.shard else True, num_workers=2))
    assert sorted(labels_of(batches)) == list(range(NUMBER))
    for batch in batches:
        for label, image in zip(batch.label.tolist(), batch.image.numpy(), strict=True):
            assert manifest.check_image(label, image)
            assert not manifest.check_image(label, image ^ 1)


@contextlib.contextmanager
def dead_for_a_while(store):
    """A thread for what reads from the store, which is dead until a request has found that it is."""
    with ThreadPoolExecutor(1) as pool:
        store.kill()
        yield pool
        with socket.create_server(("127.0.0.1", store.port)) as listener:
            listener.settimeout(60 * TIMEOUT_SCALE)
            listener.accept()[0].close()
        store.start()  # in this thread, with which it would end


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sample_format", FORMATS[:2], ids=str)
def test_objects_are_read_once_when_the_store_dies_and_comes_back(sample_format, store, samples, servers):
    location, manifest = samples
    dataset = RPCDataset(servers, make_dataset, location, manifest, sample_format, NUMBER, None)
    loader = RPCDataloader(dataset, batch_size=4, shuffle=True, num_workers=2, retry_on=UnavailableError)
    batches = iter(loader)
    labels = labels_of([next(batches)])
    with dead_for_a_while(store) as pool:
        rest = pool.submit(labels_of, batches)
    labels += rest.result()
    assert sorted(labels) == list(range(NUMBER))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sample_format", FORMATS[2:], ids=str)
def test_shard_goes_on_where_it_was_when_the_store_dies_and_comes_back(sample_format, store, samples):
    location, manifest = samples
    # Slow enough for the store to die in the middle of a transfer.
    with Proxy(store.port, Link(0, 1e6, 1e6)) as proxy:
        far = Location(proxy.endpoint, location.bucket, location.prefix)
        found = iter(make_dataset(far, manifest, sample_format, NUMBER, None))
        first = next(found)
        with dead_for_a_while(store) as pool:
            rest = pool.submit(list, found)
        samples = [first, *rest.result()]
    assert [sample.label for sample in samples] == list(range(NUMBER))
    assert all(manifest.check_image(sample.label, sample.image.numpy()) for sample in samples)


@pytest.mark.parametrize(
    ("change", "why"),
    [(lambda _: None, "NoSuchKey"), (lambda content: content[:1000], "EOF"), (lambda _: b"", "No data")],
    ids=["missing", "cut off", "empty"],
)
def test_object_that_is_missing_or_cut_off_is_named_with_its_sample(change, why, samples, servers, damaged):
    location, manifest = samples
    url = damaged(image_key(7), change)
    assert url == f"s3://{BUCKET}/samples/objects/000007.image.npy"
    dataset = RPCDataset(servers, make_dataset, location, manifest, Format("objects"), NUMBER, None)
    loader = RPCDataloader(dataset, batch_size=4, num_workers=2, retry_on=UnavailableError)
    with pytest.raises(SampleError, match=f"sample 7 cannot be read from {url}: .*{why}"):
        list(loader)


def find_member(content, sample):
    """Where the tar member of a sample begins."""
    return content.index(f"{sample:06}.image.npy".encode())


@pytest.mark.parametrize(
    ("sample_format", "change", "message"),
    [
        (FORMATS[2], lambda _: None, "samples 40 to 79 cannot be read from {url}: .*NoSuchKey"),
        (FORMATS[2], lambda content: content[:130_000], "samples 41 to 79 cannot be read from {url}: .*end of data"),
        (FORMATS[2], lambda content: content[: find_member(content, 43)], "samples 42 to 79 .* {url}: .*empty header"),
        (FORMATS[3], lambda _: None, "samples 40 to 79 cannot be read from {url}: .*NoSuchKey"),
        (FORMATS[3], lambda content: content[:130_000], "samples 42 to 79 cannot be read from {url}: .*cut off"),
        (FORMATS[3], lambda content: content[: 2 * len(content) // SHARD], "samples 42 to 79 .* {url}: it ends before"),
        (
            FORMATS[3],
            lambda content: content[:130_000] + bytes([content[130_000] ^ 1]) + content[130_001:],
            "samples 42 to 79 cannot be read from {url}: RecordError: record 2 has a wrong checksum",
        ),
    ],
    ids=["tar missing", "tar cut", "tar short", "records missing", "records cut", "records short", "records damaged"],
)
def test_damaged_shard_is_named_with_the_place(sample_format, change, message, samples, damaged):
    location, manifest = samples
    url = damaged(shard_key(sample_format, 1), change)
    found = iter(make_dataset(location, manifest, sample_format, NUMBER, None))
    for _ in range(SHARD):
        next(found)
    with pytest.raises(SampleError, match=message.format(url=url)):
        collections.deque(found, maxlen=0)
