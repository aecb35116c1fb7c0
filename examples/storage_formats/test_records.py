"""TFRecord files: the same bytes as TensorFlow's, and no damage that goes unnoticed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("crc32c")
pytest.importorskip("tfrecord")

from examples.storage_formats.records import (
    RecordError,
    decode_example,
    encode_example,
    read_records,
    write_record,
)

FROM_TENSORFLOW = Path(__file__).with_name("tensorflow.tfrecord").read_bytes()


def make_arrays(sample):
    image = (np.arange(3 * 4 * 5) * 7 + sample).astype(np.uint8).reshape(3, 4, 5)
    return {"image": image, "label": np.array(sample)}


def write(*samples):
    file = io.BytesIO()
    for sample in samples:
        write_record(file, encode_example(make_arrays(sample)))
    return file.getvalue()


def test_files_of_tensorflow_are_read():
    found = [decode_example(record) for record in read_records(io.BytesIO(FROM_TENSORFLOW))]
    assert len(found) == 3
    for sample, arrays in enumerate(found):
        assert arrays.keys() == {"image", "label"}
        for name, array in make_arrays(sample).items():
            assert arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(arrays[name], array)


def test_what_is_written_means_the_same_as_what_tensorflow_wrote():
    """Tensors and framing are the same bytes; the order of the features in an example is up to protobuf."""
    mine, others = (list(read_records(io.BytesIO(content))) for content in (write(0, 1, 2), FROM_TENSORFLOW))
    for one, other in zip(mine, others, strict=True):
        assert len(one) == len(other)
        assert sorted(one) == sorted(other)
    assert len(write(0, 1, 2)) == len(FROM_TENSORFLOW)


def test_files_of_the_library_are_read(tmp_path):
    import tfrecord

    writer = tfrecord.TFRecordWriter(str(tmp_path / "file"))
    writer.write({"number": (7, "int")})
    writer.close()
    assert len(list(read_records(io.BytesIO((tmp_path / "file").read_bytes())))) == 1


def test_every_flipped_bit_is_an_error():
    content = write(0, 1)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(RecordError, match=r"record [01] .*(wrong checksum|cut off)"):
            list(read_records(io.BytesIO(damaged)))


def test_every_cut_but_between_records_is_an_error():
    content, first = write(0, 1), len(write(0))
    for end in range(len(content)):
        file = io.BytesIO(content[:end])
        if end in (0, first):
            assert len(list(read_records(file))) == end // first
        else:
            with pytest.raises(RecordError, match=f"record {int(end > first)} is cut off"):
                list(read_records(file))
