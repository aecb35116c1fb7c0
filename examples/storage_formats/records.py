"""TFRecord files of tensors, as TensorFlow writes them, without TensorFlow.

========  =====================================================
bytes     a record
========  =====================================================
8         length of the data, little-endian
4         masked CRC-32C of these eight bytes
length    data: an ``Example`` of serialized tensors
4         masked CRC-32C of the data
========  =====================================================

``tf.io.serialize_tensor`` makes a ``TensorProto``. Its three fields that matter are declared here, for the protobuf
library to write and read. TensorFlow declares the names in this file and in ``tfrecord`` for itself, so a process that
imports it must not import this module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import crc32c
import numpy as np
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tfrecord.example_pb2 import Example

# tensorflow/core/framework/types.proto
TYPES: dict[np.dtype, int] = {np.dtype(np.uint8): 4, np.dtype(np.int64): 9}
DTYPES = {number: dtype for dtype, number in TYPES.items()}


class RecordError(ValueError):
    """A record is cut off, or its checksum is wrong."""


def mask(checksum: int) -> int:
    """As TFRecord stores a checksum, so that one of data which holds checksums is not trivial."""
    return (((checksum >> 15) | (checksum << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def write_record(file: BinaryIO, data: bytes) -> None:
    length = struct.pack("<Q", len(data))
    file.write(length + struct.pack("<I", mask(crc32c.crc32c(length))))
    file.write(data)
    file.write(struct.pack("<I", mask(crc32c.crc32c(data))))


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the data of each record of a file that is read from its beginning to its end."""
    record = 0
    while header := file.read(12):
        if len(header) < 12:
            raise RecordError(f"record {record} is cut off in its length")
        length, length_checksum = struct.unpack("<QI", header)
        if mask(crc32c.crc32c(header[:8])) != length_checksum:
            raise RecordError(f"the length of record {record} has a wrong checksum")
        data, footer = file.read(length), file.read(4)
        if len(data) + len(footer) < length + 4:
            raise RecordError(f"record {record} is cut off: {len(data)} of {length} bytes")
        if mask(crc32c.crc32c(data)) != struct.unpack("<I", footer)[0]:
            raise RecordError(f"record {record} has a wrong checksum")
        yield data
        record += 1


def encode_example(arrays: dict[str, np.ndarray]) -> bytes:
    """An ``Example`` with one serialized tensor per name."""
    example = Example()
    for name, array in arrays.items():
        tensor = TensorProto(dtype=TYPES[array.dtype], tensor_content=array.tobytes())
        tensor.tensor_shape.SetInParent()
        for size in array.shape:
            tensor.tensor_shape.dim.add(size=size)
        example.features.feature[name].bytes_list.value.append(tensor.SerializeToString())
    return example.SerializeToString(deterministic=True)


def decode_example(data: bytes) -> dict[str, np.ndarray]:
    arrays = {}
    for name, feature in Example.FromString(data).features.feature.items():
        tensor = TensorProto.FromString(feature.bytes_list.value[0])
        shape = [dim.size for dim in tensor.tensor_shape.dim]
        arrays[name] = np.frombuffer(tensor.tensor_content, DTYPES[tensor.dtype]).reshape(shape).copy()
    return arrays


def _declare_tensor() -> Any:
    """The class ``TensorProto``, in a pool of its own; numbers as in tensorflow/core/framework/tensor.proto."""
    kinds = FieldDescriptorProto
    file = FileDescriptorProto(name="storage_formats/tensor.proto", package="storage_formats", syntax="proto3")

    def declare(message: str, *fields: tuple[str, int, int, str]) -> None:
        declared = file.message_type.add(name=message)
        for name, number, kind, of in fields:
            label = kinds.LABEL_REPEATED if name == "dim" else kinds.LABEL_OPTIONAL
            declared.field.add(name=name, number=number, type=kind, label=label, type_name=of or None)

    declare("Dim", ("size", 1, kinds.TYPE_INT64, ""))
    declare("Shape", ("dim", 2, kinds.TYPE_MESSAGE, ".storage_formats.Dim"))
    declare(
        "TensorProto",
        ("dtype", 1, kinds.TYPE_INT32, ""),
        ("tensor_shape", 2, kinds.TYPE_MESSAGE, ".storage_formats.Shape"),
        ("tensor_content", 4, kinds.TYPE_BYTES, ""),
    )
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("storage_formats.TensorProto"))


TensorProto = _declare_tensor()
