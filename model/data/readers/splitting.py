"""Cuts a stream of UTF-8 blocks into records without holding more than one of them, or one that is too long."""

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from model.data.readers.records import DamagedFile, Dropped, dropped

_SAMPLE_BYTES = 1 << 10


class Boundaries(Protocol):
    """Finds where records begin and end, in blocks that are given one after the other."""

    def begin(self, block: bytes, start: int) -> int:
        """Returns where the next record begins: its length if not in this block. Called between records."""

    def end(self, block: bytes, start: int) -> int:
        """Returns where the record ends that begins, or continues, at start: -1 if not in this block."""

    def unfinished(self) -> str:
        """Returns what the file lacks if it ends here, or an empty string."""


def split_records(blocks: Iterable[bytes], boundaries: Boundaries, max_bytes: int) -> Iterator[bytes | Dropped]:
    """Yields the records, without their line ends: one newline, and one carriage return before it.

    Raises:
        DamagedFile: The file ends where no record may end; what `blocks` raises.
    """
    held: list[bytes] = []
    size = 0
    for block in blocks:
        start = 0
        while held or (start := boundaries.begin(block, start)) < len(block):
            end = boundaries.end(block, start)
            if end < 0:
                size += len(block) - start
                held.append(block[start:])
                if size > max_bytes:
                    held = [b"".join(held)[:_SAMPLE_BYTES]]
                break
            piece = block[start:end]
            start = end
            if held:
                size += len(piece)
                piece = b"".join((*held, piece))
                held.clear()
            else:
                size = len(piece)
            yield _record(piece, size, max_bytes)
            size = 0
    if lack := boundaries.unfinished():
        raise DamagedFile(lack)
    if held:
        yield _record(b"".join(held), size, max_bytes)


def _record(piece: bytes, size: int, max_bytes: int) -> bytes | Dropped:
    is_ended = piece.endswith(b"\n")
    if size - is_ended > max_bytes:
        return dropped("too_long", piece)
    return piece[:-1].removesuffix(b"\r") if is_ended else piece.removesuffix(b"\r")


class Lines:
    """Records that `\\n`, and nothing else, ends."""

    def begin(self, block: bytes, start: int) -> int:
        return start

    def end(self, block: bytes, start: int) -> int:
        return block.find(b"\n", start) + 1 or -1

    def unfinished(self) -> str:
        return ""


class CsvRows:
    """Lines that go on where a quoted field does. Quotes count at the start of a field only, and doubled within it.

    Source: RFC 4180, section 2.
    """

    def __init__(self, delimiter: str) -> None:
        other = rb"[^%b\n]*+" % re.escape(delimiter.encode())
        quoted = rb'"(?:[^"]++|"")*+"'
        field = rb"(?:%b%b|(?!\")%b)" % (quoted, other, other)
        self._row = re.compile(rb"%b(?:%b%b)*+\n" % (field, re.escape(delimiter.encode()), field))
        self._unquoted_end = re.compile(rb"[%b\n]" % re.escape(delimiter.encode()))
        self._place = "row"

    def begin(self, block: bytes, start: int) -> int:
        self._place = "row"
        return start

    def end(self, block: bytes, start: int) -> int:
        if self._place == "row" and (row := self._row.match(block, start)):
            return row.end()
        # The row is not all in this block, or began in another.
        place = start
        while place < len(block):
            if self._place == "quoted":
                place = block.find(b'"', place) + 1
                if not place:
                    break
                self._place = "quote"
            elif block[place] == ord('"') and self._place != "unquoted":
                place += 1  # the first of a field, or the second of two in a quoted one
                self._place = "quoted"
            elif found := self._unquoted_end.search(block, place):
                place = found.end()
                if found[0] == b"\n":
                    return place
                self._place = "field"
            else:
                self._place = "unquoted"
                break
        return -1

    def unfinished(self) -> str:
        return "it ends inside a quoted field" if self._place == "quoted" else ""


class JsonValues:
    """The elements of arrays, and what stands outside of them, one after the other. Commas are not asked for.

    What is no JSON ends where a value can begin or end, so that what follows is found again.
    """

    _between = re.compile(rb"[\s,]*+")
    _scalar_end = re.compile(rb'[,\n"\[\]{}]')
    _up_to_bracket = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
    _string_end = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)

    def __init__(self) -> None:
        self._is_in_array = False
        self._place = "between"
        self._depth = 0

    def begin(self, block: bytes, start: int) -> int:
        while (start := _skip(self._between, block, start)) < len(block):
            if block[start] == (ord("]") if self._is_in_array else ord("[")):
                self._is_in_array = not self._is_in_array
                start += 1
            else:
                break
        return start

    def end(self, block: bytes, start: int) -> int:
        place = start
        if self._place == "between":
            first = block[start : start + 1]
            if first in b"]}":
                return start + 1
            self._place = "structure" if first in b"{[" else "string" if first == b'"' else "scalar"
            place += first == b'"'
        if self._place == "scalar":
            found = self._scalar_end.search(block, place)
            self._place = "scalar" if found is None else "between"
            return -1 if found is None else found.start()
        while place < len(block):
            if self._place == "escape":
                self._place = "string"
            elif self._place == "string":
                place = _skip(self._string_end, block, place)
                if place == len(block):
                    break
                self._place = "escape" if block[place] == ord("\\") else "structure"
            else:
                place = _skip(self._up_to_bracket, block, place)
                if place == len(block):
                    break
                if block[place] == ord('"'):
                    self._place = "string"
                else:
                    self._depth += 1 if block[place] in b"{[" else -1
            place += 1
            if self._place == "structure" and not self._depth:
                self._place = "between"
                return place
        return -1

    def unfinished(self) -> str:
        if self._place in ("structure", "string", "escape"):
            return "it ends inside a value"
        return "it ends inside an array" if self._is_in_array else ""


def _skip(pattern: re.Pattern[bytes], block: bytes, place: int) -> int:
    match = pattern.match(block, place)
    assert match, "the pattern matches at least nothing"
    return match.end()
