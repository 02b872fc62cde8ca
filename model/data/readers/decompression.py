"""Decompresses streams in bounded memory, and gives every byte that lies before a cut or damage."""

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Union

import zstandard

from model.data.readers.blocks import read_blocks
from model.data.readers.records import DamagedFile

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}

# zlib makes 2 MiB out of this, zstd 64 MiB (128 KiB out of 4 bytes); they cannot be told how much to return.
_FEED_BYTES = 1 << 11
# What bzip2 and xz, which make gigabytes out of a feed, are told to return at once.
_OUTPUT_BYTES = 1 << 16
# Archives made with `zstd --long=31` or `xz --lzma2=dict=1536MiB` need more than the libraries' default limits.
_WINDOW_BYTES = 1 << 31

_ERRORS = (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError)  # bz2 raises a bare OSError
# gzip and xz allow zeros after a member or stream.
_PADDED = ("gzip", "xz")


# Can be told how much to return at once; the other decoders cannot.
_Bounded = bz2.BZ2Decompressor | lzma.LZMADecompressor
# Of one gzip member, zstd frame, bzip2 or xz stream.
_Decoder = Union["zlib._Decompress", "zstandard.ZstdDecompressionObj", bz2.BZ2Decompressor, lzma.LZMADecompressor]


def decompressed(open_file: Callable[[], BinaryIO], stream: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yields what all members, frames or streams of a compressed file hold.

    "Before the damage" is as fine as the decoder: a symbol of gzip or xz, a block of zstd (at most 128 KiB) or bzip2
    (at most 900 kB). It trips where the data makes no sense or, at the end of the member, frame or block, misses its
    checksum: what a changed byte turned into other valid data has been yielded by then.

    Args:
        open_file: Opens the file again, where it is damaged.
        stream: The file, at its start.
        compression: One of the values of COMPRESSIONS.

    Raises:
        DamagedFile: After all that could be decompressed before the damage.
    """
    fed = yielded = 0

    def feeds() -> Iterator[bytes]:
        nonlocal fed
        for data in _feeds(stream):
            yield data
            fed += len(data)

    try:
        for data in _decoder_output(feeds(), compression):
            yielded += len(data)
            yield data
        return
    except _DecoderTripped:
        pass  # raised again below
    # The decoder kept to itself what it made of the feed that it tripped over: read up to there, then byte by byte.
    fresh = bytearray()
    with open_file() as again:
        try:
            for data in _decoder_output(_feeds(again, fine_from=fed), compression, fine_from=yielded):
                fresh += data[yielded:]
                yielded -= min(yielded, len(data))
                if len(fresh) >= _OUTPUT_BYTES:
                    yield bytes(fresh)
                    fresh.clear()
        except DamagedFile:
            yield bytes(fresh)
            raise
    yield bytes(fresh)


class _DecoderTripped(DamagedFile):
    """Not at the end of the file: the decoder may hold output back."""


def _feeds(stream: BinaryIO, fine_from: int | None = None) -> Iterator[bytes]:
    """Yields the stream in pieces that are safe to decode; those within a feed after byte fine_from as single bytes."""
    position = 0
    for block in read_blocks(stream):
        for start in range(0, len(block), _FEED_BYTES):
            data = block[start : start + _FEED_BYTES]
            if fine_from is not None and position - _FEED_BYTES < fine_from < position + len(data):
                yield from (data[i : i + 1] for i in range(len(data)))
            else:
                yield data
            position += len(data)


def _decoder_output(feeds: Iterable[bytes], compression: str, fine_from: int | None = None) -> Iterator[bytes]:
    """Yields what the feeds decompress to; after byte fine_from of it as single bytes, where the decoder can."""
    decoder: _Decoder | None = None
    made = 0
    for data in feeds:
        while data:
            if decoder is None or decoder.eof:
                data = data.lstrip(b"\0") if decoder and compression in _PADDED else data
                if not data:
                    break
                decoder = _new_decoder(compression)
            while True:
                most = _OUTPUT_BYTES if fine_from is None else max(1, min(_OUTPUT_BYTES, fine_from - made))
                output, has_more = _decode(decoder, data, most)
                made += len(output)
                # What follows works on one block at a time.
                yield from (output[i : i + _OUTPUT_BYTES] for i in range(0, len(output), _OUTPUT_BYTES))
                if not has_more:
                    break
                data = b""
            data = decoder.unused_data
    if decoder and not decoder.eof:
        raise DamagedFile(f"the {compression} stream ends before its end mark")


def _decode(decoder: _Decoder, data: bytes, most: int) -> tuple[bytes, bool]:
    """Returns what the decoder makes of the data, at most that many bytes if it can, and whether it would make more."""
    try:
        if isinstance(decoder, _Bounded):
            return decoder.decompress(data, most), not (decoder.eof or decoder.needs_input)
        return decoder.decompress(data), False
    except _ERRORS as error:
        raise _DecoderTripped(str(error)) from error


def _new_decoder(compression: str) -> _Decoder:
    if compression == "gzip":
        return zlib.decompressobj(wbits=31)
    if compression == "zstd":
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    if compression == "bzip2":
        return bz2.BZ2Decompressor()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_WINDOW_BYTES)
