"""Files as iterators of byte blocks, and back."""

import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from model.data.readers.records import DamagedFile, Dropped, dropped

BLOCK_BYTES = 1 << 16


def read_blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Yields a file's bytes from where it stands."""
    while block := stream.read(BLOCK_BYTES):
        yield block


def joined_blocks(blocks: Iterable[bytes], max_bytes: int) -> bytes | Dropped:
    """Returns all bytes of a file, unless they are too many to be held."""
    held: list[bytes] = []
    size = 0
    for block in blocks:
        held.append(block)
        size += len(block)
        if size > max_bytes:
            return dropped("too_long", held[0])
    return b"".join(held)


class BlockReader(io.RawIOBase):
    """Blocks as a file that libraries can read. It holds what was asked for and one block."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._block = b""
        self._start = 0
        self._position = 0
        self._damage: DamagedFile | None = None

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Returns the next `size` bytes; fewer only at the end, or before damage, which the next reading raises."""
        assert size >= 0, "the rest of a file may not fit into memory"
        parts: list[bytes] = []
        missing = size
        while missing > 0:
            if self._start == len(self._block):
                self._block, self._start = self._next_block(), 0
                if not self._block:
                    break
            part = self._block[self._start : self._start + missing]
            self._start += len(part)
            missing -= len(part)
            parts.append(part)
        if self._damage and not parts:
            raise self._damage
        self._position += size - missing
        return b"".join(parts)

    def _next_block(self) -> bytes:
        try:
            return next(filter(None, self._blocks), b"")
        except DamagedFile as damage:
            self._damage = damage
            return b""

    def tell(self) -> int:
        return self._position
