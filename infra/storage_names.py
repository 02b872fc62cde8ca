"""What both kinds of storage share: the names of objects, patterns that they match, and the check of a range."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

PARTIAL = ".partial-"  # how the names of files begin that are not whole yet
WILD = re.compile(r"[*?]")


@dataclass(frozen=True)
class Entry:
    """One stored object. `version` changes when its content does."""

    name: str
    size_bytes: int
    version: str


Entries = list[Entry]


def whole_range(uri: str, data: bytes, start: int, length: int) -> bytes:
    """`data`, which must be the `length` bytes that were asked for."""
    if len(data) != length:
        raise OSError(f"{uri} ends after {start + len(data)} bytes; {start + length} expected")
    return data


def pattern_parts(pattern: str) -> tuple[str, ...]:
    """The pattern's parts; a `**` at its end means the files at any depth."""
    parts = pattern.split("/")
    parts = [part for i, part in enumerate(parts) if part != "**" or parts[i + 1 : i + 2] != ["**"]]
    return (*parts, "*") if parts[-1] == "**" else tuple(parts)


def name_matches(name: Sequence[str], pattern: Sequence[str], leads: bool = False) -> bool:
    """Whether the name matches; with `leads`, whether names below it can."""
    if not name or not pattern:
        return bool(pattern) if leads else not name and not pattern
    if pattern[0] == "**":
        return name_matches(name, pattern[1:], leads) or name_matches(name[1:], pattern, leads)
    return bool(_regex(pattern[0]).fullmatch(name[0])) and name_matches(name[1:], pattern[1:], leads)


@cache
def _regex(part: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"(\\\*)+", ".*", re.escape(part)).replace(r"\?", "."), re.DOTALL)
