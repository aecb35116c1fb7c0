"""The samples: what is in them, under which keys they are stored, and the manifest that says so.

A sample is an image of random bytes, which do not compress, and a label, which is the number of the sample. The
manifest holds a checksum of each image, so a training can tell that what it got is right, whichever way it came.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

import crc32c
import numpy as np
from botocore.exceptions import BotoCoreError, ClientError

from examples.storage_formats.errors import StudyError
from examples.storage_formats.plan import Format
from examples.storage_formats.storage import Location, get_client, read_object

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What is stored.

    Attributes:
        number: Samples.
        side: Height and width of an image, which has three channels of uint8.
        shards: Sizes of shards, each a divisor of ``number``.
        checksums: CRC-32C of each image.
    """

    number: int
    side: int
    shards: list[int]
    checksums: list[int] = field(default_factory=list, repr=False)

    @property
    def sample_bytes(self) -> int:
        return 3 * self.side**2

    def make_image(self, sample: int) -> np.ndarray:
        return np.random.default_rng(sample).integers(0, 256, (3, self.side, self.side), np.uint8)

    def check_image(self, sample: int, image: np.ndarray) -> bool:
        return checksum(image) == self.checksums[sample]

    def shard_keys(self, shard_format: Format) -> list[str]:
        number = self.number // shard_format.shard
        return [shard_key(shard_format, shard) for shard in range(number)]


def checksum(image: np.ndarray) -> int:
    return crc32c.crc32c(np.ascontiguousarray(image).data)


def image_key(sample: int) -> str:
    return f"objects/{sample:06}.image.npy"


def label_key(sample: int) -> str:
    return f"objects/{sample:06}.label.npy"


def shard_key(shard_format: Format, shard: int) -> str:
    ending = {"webdataset": "tar", "tfrecord": "tfrecord"}[shard_format.kind]
    return f"{shard_format}/{shard:05}.{ending}"


def side_of(sample_bytes: float) -> int:
    return max(1, round(math.sqrt(sample_bytes / 3)))


def write_manifest(location: Location, manifest: Manifest) -> None:
    body = json.dumps(asdict(manifest)).encode()
    get_client(location.endpoint).put_object(Bucket=location.bucket, Key=location.prefix + MANIFEST, Body=body)


def read_manifest(location: Location) -> Manifest | None:
    """The manifest, or None where nothing has been written.

    Raises:
        StudyError: There is no such bucket or storage, or the credentials are wrong.
    """
    where = f"bucket {location.bucket!r} of {location.endpoint}"
    try:
        return Manifest(**json.loads(read_object(location, MANIFEST)))
    except ClientError as error:
        code = error.response["Error"]["Code"]
        if code == "NoSuchKey":
            return None
        advice = {
            403: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to keys that may read it",
            404: "make the bucket, or name another one with --bucket",
        }.get(error.response["ResponseMetadata"]["HTTPStatusCode"], "see what the storage says")
        raise StudyError(f"{where} cannot be read: {error}; {advice}") from error
    except BotoCoreError as error:
        raise StudyError(f"{where} cannot be read: {error}") from error
    except (TypeError, ValueError) as error:
        raise StudyError(f"{location.url(MANIFEST)} is not a manifest of this study: {error}") from error
