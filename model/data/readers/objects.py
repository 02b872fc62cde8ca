"""JSON records and rows of CSV as mappings of their fields."""

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from model.data.readers.records import DamagedFile, Dropped, decoded, dropped

Record = tuple[dict[str, Any], bytes]
"""A record's fields by name, and the record as it was read."""

# Python's parser goes as deep as its caller left room for, out of a thousand calls: this is there in any process.
_MAX_DEPTH = 512
_BRACKETS_AND_STRINGS = re.compile(rb'[\[{]|[\]}]|"(?:[^"\\]++|\\.)*+"', re.DOTALL)

# Numbers are no text. `int` refuses those of more than 4,300 digits; `len` takes any, and is faster than both it and
# `float`.
_decode_json = json.JSONDecoder(parse_int=len).decode

# Rows are bounded before they are parsed; the default refuses fields above 128 KiB.
csv.field_size_limit(sys.maxsize)
_DELIMITERS = ",;\t|"  # the first of those that are as often there
_MAX_HEADER_BYTES = 1 << 16
_QUOTED = re.compile(rb'"[^"]*"')


def json_objects(raws: Iterable[bytes | Dropped]) -> Iterator[Record | Dropped]:
    """Yields the objects, with integers replaced by other ones; what is nested deeper than 512 levels is dropped."""
    for raw in raws:
        if isinstance(raw, Dropped):
            yield raw
            continue
        if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH and _depth(raw) > _MAX_DEPTH:
            yield dropped("too_deep", raw)
            continue
        try:
            record = _decode_json(decoded(raw))
        except (ValueError, RecursionError):  # the latter of what ends inside a value: its depth is 0
            yield dropped("invalid_json", raw)
            continue
        yield (record, raw) if isinstance(record, dict) else dropped("not_an_object", raw)


def find_delimiter(blocks: Iterable[bytes]) -> tuple[str, Iterator[bytes]]:
    """Returns what separates the columns, which is what is in the header most often, and all blocks."""
    left, head = iter(blocks), b""
    while b"\n" not in head and len(head) < _MAX_HEADER_BYTES and (block := next(left, b"")):
        head += block
    header = _QUOTED.sub(b"", head.partition(b"\n")[0])
    return max(_DELIMITERS, key=lambda delimiter: header.count(delimiter.encode())), chain((head,), left)


def csv_objects(rows: Iterable[bytes | Dropped], delimiter: str, fields: Iterable[str]) -> Iterator[Record | Dropped]:
    """Yields the rows after the header.

    Raises:
        DamagedFile: Two columns have the name of one of the fields.
    """
    header: list[str] | None = None
    for raw in rows:
        if isinstance(raw, Dropped):
            yield raw
            continue
        try:
            (row,) = csv.reader((decoded(raw),), delimiter=delimiter)
        except csv.Error:
            yield dropped("invalid_csv", raw)
            continue
        if header is None:
            header = row
            if twice := next((name for name in fields if header.count(name) > 1), None):
                raise DamagedFile(f"{header.count(twice)} columns are named {twice!r}")
        elif len(row) == len(header):
            yield dict(zip(header, row, strict=True)), raw
        else:
            yield dropped("uneven_row", raw)


def leaf_names(record: dict[str, Any]) -> Iterator[str]:
    """Yields the names of a record's fields, a.b for field b of object a."""
    found = list(reversed(record.items()))
    while found:
        name, value = found.pop()
        if isinstance(value, dict) and value:
            found += [(f"{name}.{inner}", below) for inner, below in reversed(value.items())]
        else:
            yield name


def _depth(raw: bytes) -> int:
    """Returns how many arrays and objects are within each other; 0 if some of them do not end, which is no JSON."""
    depth = deepest = 0
    for match in _BRACKETS_AND_STRINGS.finditer(raw):
        if match[0] in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in b"]}":
            depth -= 1
    return 0 if depth else deepest
