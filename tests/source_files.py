"""Source files made in memory, and the reading of them."""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Sequence

import pytest
import zstandard

from model.data.config import SourceConfig
from model.data.readers.documents import DamagedFile, Dropped, SourceFile, read_documents

LIMIT = 1 << 20

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    # With a checksum, as the command line tool writes it.
    ".zst": lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


class Trickle(io.BytesIO):
    """A stream that gives read_bytes at a time, as a network does."""

    def __init__(self, data: bytes, read_bytes: int) -> None:
        super().__init__(data)
        self.read_bytes = read_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self.read_bytes)


def source_file(name: str, data: bytes, read_bytes: int | None = None, **source: object) -> SourceFile:
    def opened() -> io.BytesIO:
        return Trickle(data, read_bytes) if read_bytes else io.BytesIO(data)

    return SourceFile(SourceConfig.model_validate({"uri": "x", **source}), "s", name, opened, len(data))


def read(
    name: str, data: bytes, limit: int = LIMIT, read_bytes: int | None = None, **source: object
) -> list[str | Dropped]:
    return list(read_documents(source_file(name, data, read_bytes, **source), limit))


def read_until_damage(
    name: str, data: bytes, read_bytes: int | None = None, **source: object
) -> tuple[list[str | Dropped], str]:
    records: list[str | Dropped] = []
    with pytest.raises(DamagedFile) as damage:
        records.extend(read_documents(source_file(name, data, read_bytes, **source), LIMIT))
    return records, str(damage.value)


def encodings_of(name: str, data: bytes, **source: object) -> list[str]:
    encodings: list[str] = []
    list(read_documents(source_file(name, data, **source), LIMIT, encodings.append))
    return encodings


def json_lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def json_array(*texts: str) -> bytes:
    return json.dumps([{"text": text} for text in texts], ensure_ascii=False, indent=1).encode()


def csv_rows(texts: Sequence[str], delimiter: str = ",", quoting: int = csv.QUOTE_MINIMAL) -> bytes:
    out = io.StringIO()
    # The header's second column keeps a row of one empty text from being a blank line.
    rows = csv.writer(out, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    rows.writerow(["text", "number"])
    rows.writerows((text, number) for number, text in enumerate(texts))
    return out.getvalue().encode()


def decoded_byte_by_byte(data: bytes, suffix: str) -> bytes:
    decoder: object = {
        ".gz": lambda: zlib.decompressobj(wbits=31),
        ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
        ".bz2": bz2.BZ2Decompressor,
        ".xz": lzma.LZMADecompressor,
    }[suffix]()
    return b"".join(decoder.decompress(data[i : i + 1]) for i in range(len(data)))  # type: ignore[attr-defined]
