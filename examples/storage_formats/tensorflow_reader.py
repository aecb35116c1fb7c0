"""TFRecord files read by TensorFlow itself, through a mount: its packages for Python know no ``s3://``."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf
import torch

from examples.storage_formats.readers import Sample


def read_batches(paths: list[str], rank: int, ranks: int, batch_size: int, reads: int) -> Iterator[Sample]:
    """Batches of this rank's share of the files.

    Args:
        paths: All files.
        rank: This process, of ``ranks``.
        ranks: Training processes.
        batch_size: Samples per batch.
        reads: Files that are read at a time; 0 to let TensorFlow choose.
    """
    tf.config.set_visible_devices([], "GPU")
    number = reads or tf.data.AUTOTUNE
    files = tf.data.Dataset.from_tensor_slices(paths).shard(ranks, rank)
    records = files.interleave(
        tf.data.TFRecordDataset, cycle_length=reads or None, num_parallel_calls=number, deterministic=False
    )
    features = {name: tf.io.FixedLenFeature([], tf.string) for name in ("image", "label")}

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(record, features)
        return tf.io.parse_tensor(example["image"], tf.uint8), tf.io.parse_tensor(example["label"], tf.int64)

    batches = records.map(parse, num_parallel_calls=number).batch(batch_size).prefetch(tf.data.AUTOTUNE)
    # How long a read took is TensorFlow's secret.
    for image, label in batches.as_numpy_iterator():
        yield Sample(torch.from_numpy(image), torch.from_numpy(label), torch.full((len(label),), torch.nan))
