"""Character encodings of text files: detected from their first bytes, and brought to UTF-8 block by block."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import charset_normalizer

from model.data.records import BYTE_ORDER_MARK, DamagedFile, replace_surrogates

# The mark of UTF-16-LE starts that of UTF-32-LE, which therefore comes first.
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# Bytes of a character, the place of one that is zero in many characters, and of one that hardly ever is.
_WIDE = {"utf-32-le": (4, 3, 0), "utf-32-be": (4, 0, 3), "utf-16-le": (2, 1, 0), "utf-16-be": (2, 0, 1)}
_MIN_ZERO_SHARE = 0.05
# Those that text was written in before UTF-8; a guess among all that Python knows, EBCDIC included, is worse.
_LEGACY = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874"),
    *("iso8859_2", "iso8859_5", "iso8859_7", "koi8_r", "koi8_u"),
    *("gb18030", "big5", "cp932", "euc_jp", "cp949"),
)
_FALLBACK = "cp1252"

_HEAD_BYTES = 1 << 20
_EVIDENCE_BYTES = 1 << 16
# Fewer bytes that are no UTF-8 than this are damage, not another encoding.
_MIN_FAULTS = 3


def as_utf8(blocks: Iterable[bytes], encoding: str, on_encoding: Callable[[str], None]) -> Iterator[bytes]:
    """Yields the same text in UTF-8 without a byte order mark; what the encoding cannot decode becomes U+FFFD.

    Bytes of a file in UTF-8 are passed on as they are, invalid ones included.

    Args:
        blocks: The file.
        encoding: Its encoding; empty to detect it on the first MiB. Where that is ASCII, on the first MiB from where it
            ceases to be.
        on_encoding: Called with the encoding's name, once.

    Raises:
        DamagedFile: What `blocks` raises, after the text before.
    """
    head, blocks = _peeked(blocks)
    if not encoding:
        encoding = marked_encoding(head) or _wide_encoding(head)
    if not encoding:
        for block in blocks:
            if not block.isascii():
                head, blocks = _peeked(chain((block,), blocks))
                encoding = _byte_encoding(head)
                break
            yield block
    encoding = encoding or "utf-8"
    on_encoding(encoding)
    if encoding == "utf-8":
        first = next(blocks, b"")
        yield first.removeprefix(BYTE_ORDER_MARK)
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    is_first = True
    for data in chain(blocks, (None,)):
        text = decoder.decode(data or b"", final=data is None)
        text = text.removeprefix("\ufeff") if is_first else text
        is_first = is_first and not text
        yield replace_surrogates(text).encode()


def marked_encoding(head: bytes) -> str:
    """Returns the encoding that a byte order mark tells, or an empty string."""
    return next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), "")


def _wide_encoding(head: bytes) -> str:
    """Returns UTF-16 or UTF-32 without a mark, or an empty string.

    Characters below U+0100, spaces among them, have a zero in a place where hardly any character of a text has none.
    """
    for encoding, (width, zero_place, other_place) in _WIDE.items():
        zeros = head[zero_place::width].count(0)
        others = head[other_place::width].count(0)
        if zeros > _MIN_ZERO_SHARE * len(head) / width and zeros > 10 * others and _decodes(head, encoding):
            return encoding
    return ""


def _byte_encoding(head: bytes) -> str:
    if _decodes(head, "utf-8"):
        return "utf-8"
    text = head.decode("utf-8", errors="replace")
    faults = text.count("\ufffd")
    others = len(text) - len(text.encode("ascii", errors="ignore")) - faults
    # Pairs of bytes in an East Asian encoding are UTF-8 by chance, but not two thirds of them.
    if faults < _MIN_FAULTS or others > 2 * faults:
        return "utf-8"
    evidence = b"\n".join(line for line in head.split(b"\n") if not line.isascii())[:_EVIDENCE_BYTES]
    best = charset_normalizer.from_bytes(evidence, cp_isolation=list(_LEGACY)).best()
    return codecs.lookup(best.encoding if best else _FALLBACK).name


def _decodes(head: bytes, encoding: str) -> bool:
    """Returns whether all of it is valid but for a character that is cut at the end."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _peeked(blocks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Returns the first MiB, or less if the file ends or is damaged before, and all blocks."""
    blocks = iter(blocks)
    held: list[bytes] = []
    size = 0
    damage = None
    try:
        for block in blocks:
            held.append(block)
            size += len(block)
            if size >= _HEAD_BYTES:
                break
    except DamagedFile as error:
        damage = error
    head = b"".join(held)

    def again() -> Iterator[bytes]:
        yield head
        if damage:
            raise damage
        yield from blocks

    return head, again()
