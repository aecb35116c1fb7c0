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
import threading
from pathlib import Path

import pytest

pytest.importorskip("boto3")
pytest.importorskip("crc32c")
pytest.importorskip("matplotlib")
pytest.importorskip("tfrecord")
pytest.importorskip("webdataset")

from examples.storage_formats import mount
from examples.storage_formats.__main__ import main, node_servers, parse_arguments, prepare_samples
from examples.storage_formats.errors import SampleError, StudyError, UnavailableError
from examples.storage_formats.plan import Format, Link
from examples.storage_formats.proxy import Proxy
from examples.storage_formats.readers import make_dataset
from examples.storage_formats.samples import MANIFEST, image_key, shard_key
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(number, tmp_path):
    options = ["--quick", "--ranks", "1", "--loaders", "rpc:4", "--formats", "objects", "tfrecord-8"]
    with start_study(tmp_path, *options, "--samples-per-worker", "100000", "--longest-epoch", "100000") as process:
        wait_until(
            lambda: find_left_behind(tmp_path) and "storage_formats.train" in str(find_left_behind(tmp_path)), 120
        )
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


def come_back(store):
    """Start the store again, once a request has found that it is not there."""
    with socket.create_server(("127.0.0.1", store.port)) as listener:
        listener.accept()[0].close()
    store.start()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sample_format", FORMATS[:2], ids=str)
def test_objects_are_read_once_when_the_store_dies_and_comes_back(sample_format, store, samples, servers):
    location, manifest = samples
    dataset = RPCDataset(servers, make_dataset, location, manifest, sample_format, NUMBER, None)
    loader = RPCDataloader(dataset, batch_size=4, shuffle=True, num_workers=2, retry_on=UnavailableError)
    batches = iter(loader)
    labels = labels_of([next(batches)])
    store.kill()
    thread = threading.Thread(target=come_back, args=(store,))
    thread.start()
    labels += labels_of(batches)
    thread.join()
    assert sorted(labels) == list(range(NUMBER))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("sample_format", FORMATS[2:], ids=str)
def test_shard_goes_on_where_it_was_when_the_store_dies_and_comes_back(sample_format, store, samples):
    location, manifest = samples
    # Slow enough for the store to die in the middle of a transfer.
    with Proxy(store.port, Link(0, 1e6, 1e6)) as proxy:
        far = Location(proxy.endpoint, location.bucket, location.prefix)
        found = iter(make_dataset(far, manifest, sample_format, NUMBER, None))
        labels = [next(found).label]
        store.kill()
        thread = threading.Thread(target=come_back, args=(store,))
        thread.start()
        for sample in found:
            assert manifest.check_image(sample.label, sample.image.numpy())
            labels.append(sample.label)
        thread.join()
    assert labels == list(range(NUMBER))


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


def arguments(*options):
    return parse_arguments(["--samples", "80", "--sample-bytes", "60e3", "--shards", "40", *options])


def test_samples_that_are_there_are_used_and_others_refused(samples):
    location, manifest = samples
    assert prepare_samples(location, arguments()) == manifest
    with pytest.raises(StudyError, match=r"holds 80 samples of 59643 bytes in shards of \[40\]: ask for these"):
        prepare_samples(location, arguments("--shards", "8"))


def test_empty_bucket_is_an_error_where_nothing_may_be_written(store):
    location = Location(store.endpoint, BUCKET, "empty/")
    with pytest.raises(StudyError, match=r"there are no samples at s3://storage-formats/empty/.*--write-only first"):
        prepare_samples(location, arguments("--read-only", "--data", "unused"))


def test_bucket_that_does_not_exist_is_named(store):
    with pytest.raises(StudyError, match=r"bucket 'nowhere' of .* cannot be read: .*name another one with --bucket"):
        prepare_samples(Location(store.endpoint, "nowhere"), arguments())


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys_are_an_error_before_anything_is_started(wrong, store, capsys):
    endpoint = store.endpoint.replace("127.0.0.1", "localhost")  # a client of its own, with these credentials
    get_client.cache_clear()
    with environment(**{wrong: "wrong"}):
        status = main(["--endpoint", endpoint, "--bucket", BUCKET, "--samples", "80", "--shards", "40"])
    get_client.cache_clear()
    assert status == 2
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--endpoint http://127.0.0.1:9", "--endpoint needs --bucket"),
        ("--bucket b", "--bucket needs --endpoint"),
        ("--endpoint http://127.0.0.1:9 --bucket b --links 0:1:1", "--links and --endpoint exclude each other"),
        ("--endpoint http://127.0.0.1:9 --bucket b --data d", "--data and --endpoint exclude each other"),
        ("--write-only --read-only --data d", "--write-only and --read-only exclude each other"),
        ("--read-only", "--read-only needs --endpoint or --data"),
        ("--samples 0", "--samples must be 1 or more, but is 0"),
        ("--sample-bytes nan", "--sample-bytes must be 1 or more"),
        ("--samples 81", "8 does not divide 81"),
        ("--shards 0", "0 does not divide 800"),
        ("--ranks 0", "--ranks must be 1 or more"),
        ("--step -1", "--step must be 0 or more"),
        ("--formats tfrecord-9", r"--formats has tfrecord-9, but --shards has \[8, 50\]"),
        ("--loaders torch:x", "a loader is torch:WORKERS"),
        ("--links 1:2", "a link is LATENCY:RATE:TOTAL"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(StudyError, match=message):
        parse_arguments(options.split())


def test_manifest_of_something_else_is_an_error(samples, damaged):
    location, _ = samples
    damaged(MANIFEST, lambda _: b"[]")
    with pytest.raises(StudyError, match=f"{location.url(MANIFEST)} is not a manifest of this study"):
        prepare_samples(location, arguments())
