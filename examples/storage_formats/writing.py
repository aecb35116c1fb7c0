"""Write the samples to the storage in every format, with a progress bar."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import BinaryIO, cast

import numpy as np
import webdataset as wds
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError
from tqdm import tqdm

from examples.storage_formats.errors import StudyError
from examples.storage_formats.plan import Format
from examples.storage_formats.records import encode_example, write_record
from examples.storage_formats.samples import (
    Manifest,
    checksum,
    image_key,
    label_key,
    shard_key,
    side_of,
    write_manifest,
)
from examples.storage_formats.storage import Location, get_client

# Objects of this size go to the storage in parts, and larger shards are put together on disk.
IN_MEMORY = 1 << 26

# Uploads at a time.
UPLOADS = 4


def write_samples(location: Location, number: int, sample_bytes: float, shards: list[int]) -> Manifest:
    """Write all formats, and the manifest when everything is there."""
    manifest = Manifest(number, side_of(sample_bytes), shards)
    client = get_client(location.endpoint)

    def upload(key: str, file: BinaryIO) -> None:
        file.seek(0)
        client.upload_fileobj(file, location.bucket, location.prefix + key)

    def write_objects(sample: int) -> None:
        for key, array in ((image_key(sample), manifest.make_image(sample)), (label_key(sample), np.array(sample))):
            file = io.BytesIO()
            np.save(file, array)
            upload(key, file)

    def write_shard(shard_format: Format, shard: int) -> None:
        first = shard * shard_format.shard
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as spooled:
            file = cast(BinaryIO, spooled)
            fill = {"tfrecord": fill_tfrecord, "webdataset": fill_webdataset}[shard_format.kind]
            fill(file, manifest, range(first, first + shard_format.shard))
            upload(shard_key(shard_format, shard), file)

    tasks: list[tuple[int, Callable[..., None], tuple]] = [(1, write_objects, (sample,)) for sample in range(number)]
    for shard in shards:
        for kind in ("tfrecord", "webdataset"):
            tasks += [(shard, write_shard, (Format(kind, shard), place)) for place in range(number // shard)]
    size = sum(num_samples for num_samples, _, _ in tasks) * manifest.sample_bytes
    pool = ThreadPoolExecutor(UPLOADS)
    try:
        futures = {pool.submit(write, *args): num_samples for num_samples, write, args in tasks}
        with tqdm(total=size, desc="writing", unit="B", unit_scale=True, disable=None) as progress:
            for future in as_completed(futures):
                future.result()
                progress.update(futures[future] * manifest.sample_bytes)
        manifest.checksums.extend(pool.map(lambda sample: checksum(manifest.make_image(sample)), range(number)))
        write_manifest(location, manifest)
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise StudyError(
            f"bucket {location.bucket!r} of {location.endpoint} cannot be written to: {error}; it must exist, and "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must allow it"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
    return manifest


def fill_tfrecord(file: BinaryIO, manifest: Manifest, samples: range) -> None:
    for sample in samples:
        arrays = {"image": manifest.make_image(sample), "label": np.array(sample)}
        write_record(file, encode_example(arrays))


def fill_webdataset(file: BinaryIO, manifest: Manifest, samples: range) -> None:
    with wds.TarWriter(file) as writer:
        for sample in samples:
            arrays = {"image.npy": manifest.make_image(sample), "label.npy": np.array(sample)}
            writer.write({"__key__": f"{sample:06}", **arrays})
