"""Writes ``tensorflow.tfrecord``, which ``test_records.py`` reads; in an environment of its own:

pip install tensorflow-cpu==2.21.0 && python examples/storage_formats/write_with_tensorflow.py
"""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

PATH = Path(__file__).with_name("tensorflow.tfrecord")


def main() -> None:
    with tf.io.TFRecordWriter(str(PATH)) as writer:
        for sample in range(3):
            image = tf.reshape(tf.cast(tf.range(3 * 4 * 5) * 7 + sample, tf.uint8), (3, 4, 5))
            features = {}
            for name, value in {"image": image, "label": tf.constant(sample, tf.int64)}.items():
                serialized = tf.io.serialize_tensor(value).numpy()
                features[name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[serialized]))
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


if __name__ == "__main__":
    main()
