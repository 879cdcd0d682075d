"""Record files of TensorFlow Datasets, read without TensorFlow: TFRecord (plain or GZIP) and ArrayRecord.

A TFRecord frame is: uint64 length, uint32 masked CRC-32C of these 8 bytes, data, uint32 masked CRC-32C of the data, all
little-endian; mask(c) = rotate_right(c, 15) + 0xa282ead8 (tensorflow/core/lib/io/record_writer.h). Every read checks both.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MASK_DELTA = 0xA282EAD8
HEADER_BYTES, FOOTER_BYTES = 12, 4
GZIP_MAGIC = b"\x1f\x8b"
INSTALL_HINT = "pip install 'megatron-vla[data]'"
RESTORE = "restore the file, or leave its episodes out (--exclude-episodes-file)"


class RecordError(ValueError):
    """A record that cannot be read; the text names file and record."""


@dataclass(frozen=True)
class RecordPlace:
    """Where a record is: `offset` and `size` of its data in a TFRecord file (after decompression); `offset` is the record's
    number in an ArrayRecord file."""

    number: int
    offset: int
    size: int


class RecordFile(Protocol):
    """Random access to the records of one open file."""

    def records(self) -> Iterator[tuple[RecordPlace, bytes]]:
        """All records in file order, checksums verified. Raises RecordError."""
        ...

    def read(self, place: RecordPlace) -> bytes:
        """One record, checksum verified. Raises RecordError."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


def checksum_function() -> Callable[[bytes], int]:
    """CRC-32C of bytes. Raises ValueError naming the package when it is not installed."""
    try:
        import google_crc32c
    except ImportError as problem:
        raise ValueError(f"TFRecord files need the package google-crc32c -> {INSTALL_HINT}") from problem
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def masked(checksum: int) -> int:
    """TFRecord's mask: a checksum of data that holds checksums would be weak."""
    return (((checksum >> 15) | (checksum << 17)) + MASK_DELTA) & 0xFFFFFFFF


def frame_record(data: bytes) -> bytes:
    """The bytes that a TFRecord file stores for one record."""
    crc32c = checksum_function()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


class TFRecordFile:
    """A TFRecord file. GZIP files have no random access: they are held decompressed while open."""

    def __init__(self, path: Path):
        self.path = path
        self._crc32c = checksum_function()
        # A descriptor of its own and pread: no shared file position, whatever else reads the file.
        self._descriptor: int | None = os.open(path, os.O_RDONLY)
        self._content: bytes | None = None
        self._size = os.fstat(self._descriptor).st_size
        # By content: TFDS gives compressed files no other name.
        if os.pread(self._descriptor, 2, 0) == GZIP_MAGIC:
            self._content = self._decompress()
            self._size = len(self._content)

    def _decompress(self) -> bytes:
        try:
            with gzip.open(self.path) as stream:
                return stream.read()
        except (EOFError, OSError, zlib.error) as problem:
            raise RecordError(f"{self.path}: the GZIP stream is broken or cut off ({problem}) -> {RESTORE}") from problem

    @property
    def is_compressed(self) -> bool:
        """The whole file is in memory."""
        return self._content is not None

    def _bytes_at(self, offset: int, size: int) -> bytes:
        if self._content is not None:
            return self._content[offset : offset + size]
        assert self._descriptor is not None
        parts = []
        while size > 0:
            part = os.pread(self._descriptor, size, offset)
            # The end of the file: the caller knows what is missing.
            if not part:
                break
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def records(self) -> Iterator[tuple[RecordPlace, bytes]]:
        """All records in file order, checksums verified. Raises RecordError."""
        offset, number = 0, 0
        while offset < self._size:
            size = self._data_size(offset, number)
            place = RecordPlace(number, offset + HEADER_BYTES, size)
            yield place, self.read(place)
            offset, number = offset + HEADER_BYTES + size + FOOTER_BYTES, number + 1

    def _data_size(self, offset: int, number: int) -> int:
        header = self._bytes_at(offset, HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise RecordError(f"{self.path}, record {number}: cut off in its header at byte {offset} -> {RESTORE}")
        size, stored = struct.unpack("<QI", header)
        if masked(self._crc32c(header[:8])) != stored:
            raise RecordError(f"{self.path}, record {number}: wrong checksum of its length at byte {offset} -> {RESTORE}")
        # Before reading: a wrong length that passed its checksum must not allocate terabytes.
        if offset + HEADER_BYTES + size + FOOTER_BYTES > self._size:
            missing = offset + HEADER_BYTES + size + FOOTER_BYTES - self._size
            raise RecordError(f"{self.path}, record {number}: cut off, {missing} of its {size} bytes are missing -> {RESTORE}")
        return int(size)

    def read(self, place: RecordPlace) -> bytes:
        """One record, checksum verified. Raises RecordError."""
        framed = self._bytes_at(place.offset, place.size + FOOTER_BYTES)
        if len(framed) < place.size + FOOTER_BYTES:
            raise RecordError(f"{self.path}, record {place.number}: the file became shorter since it was indexed -> {RESTORE}")
        # At every read, not only in the index pass: disks and caches fail later too.
        data = framed[:-FOOTER_BYTES]
        if masked(self._crc32c(data)) != struct.unpack("<I", framed[-FOOTER_BYTES:])[0]:
            raise RecordError(f"{self.path}, record {place.number}: wrong checksum of its {place.size} bytes -> {RESTORE}")
        return data

    def close(self) -> None:
        """Release the file and what was decompressed."""
        self._content = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class ArrayRecordFile:
    """An ArrayRecord file, through the package array_record, which verifies its own checksums."""

    def __init__(self, path: Path):
        try:
            from array_record.python.array_record_module import ArrayRecordReader
        except ImportError as problem:
            raise ValueError(f"{path}: ArrayRecord files need the package array_record -> {INSTALL_HINT}") from problem
        self.path = path
        self._reader: Any = self._guarded(None, lambda: ArrayRecordReader(str(path)))
        if not self._reader.ok():
            raise RecordError(f"{path}: no readable ArrayRecord file -> {RESTORE}")

    def _guarded(self, number: int | None, call: Callable[[], Any]) -> Any:
        # The package raises RuntimeError or ValueError with absl's status text, which does not name the file.
        try:
            return call()
        except (RuntimeError, ValueError, IndexError, OSError) as problem:
            record = "" if number is None else f", record {number}"
            raise RecordError(f"{self.path}{record}: {problem} -> {RESTORE}") from problem

    def records(self) -> Iterator[tuple[RecordPlace, bytes]]:
        """All records in file order. Raises RecordError."""
        # One by one: reading all at once would hold the whole file in memory.
        for number in range(self._reader.num_records()):
            place = RecordPlace(number, number, 0)
            yield place, self.read(place)

    def read(self, place: RecordPlace) -> bytes:
        """One record. Raises RecordError."""
        found: list[bytes] = self._guarded(place.number, lambda: self._reader.read([place.number]))
        return found[0]

    def close(self) -> None:
        """Release the file."""
        self._reader.close()


def open_record_file(path: Path, file_format: str) -> TFRecordFile | ArrayRecordFile:
    """file_format: "tfrecord" or "array_record", as dataset_info.json says. Raises ValueError."""
    if not path.is_file():
        raise RecordError(f"{path}: missing -> {RESTORE}")
    if file_format == "tfrecord":
        return TFRecordFile(path)
    if file_format == "array_record":
        return ArrayRecordFile(path)
    raise ValueError(f"{path}: file format {file_format!r}; readable are tfrecord and array_record -> convert the dataset")
