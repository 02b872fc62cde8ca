"""What reading gives: a record's text, or why it has none, or that the file is damaged."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FIELD_SEPARATOR = "\n\n"

_SAMPLE_CHARS = 200
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class DamagedFile(Exception):
    """A source file cannot be read to its end: it was cut, is corrupt or is ambiguous.

    The whole records before the damage have been yielded.
    """


@dataclass(frozen=True)
class Dropped:
    """A record that gives no document.

    Attributes:
        reason: Why, as a word to count by.
        sample: At most 200 characters of what was dropped, for a person to look at; not compared.
    """

    reason: str
    sample: str = field(default="", compare=False)


def dropped(reason: str, what: bytes | str) -> Dropped:
    """Returns a Dropped with the beginning of what was dropped."""
    start = what[: 4 * _SAMPLE_CHARS]
    return Dropped(reason, (start if isinstance(start, str) else decoded(start))[:_SAMPLE_CHARS])


def decoded(data: bytes) -> str:
    """Returns UTF-8 as text, with U+FFFD for what is none and without a byte order mark."""
    return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace")


def replace_surrogates(text: str) -> str:
    """Returns text with U+FFFD in place of each lone surrogate, which no encoding can write."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def joined_fields(record: Mapping[str, Any], raw: bytes, fields: Sequence[str]) -> str | Dropped:
    """Returns the text of a record's fields, joined by an empty line, without those that are missing, null or empty.

    Args:
        record: The fields by name.
        raw: The record as it was read, for the sample.
        fields: The names that are wanted; a.b is field b of the object a, unless a field is named a.b itself.
    """
    values = [value for value in _values(record, fields) if value is not None]
    if not values:
        return dropped("no_text_field", raw)
    if not all(isinstance(value, str) for value in values):
        return dropped("not_text", raw)
    return values[0] if len(values) == 1 else FIELD_SEPARATOR.join(filter(None, values))


def _values(record: Mapping[str, Any], fields: Sequence[str]) -> Iterator[Any]:
    for name in fields:
        if name in record:
            yield record[name]
        else:
            value: Any = record
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            yield value
