"""Character encodings of text files: detected from their first bytes, and brought to UTF-8 block by block."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

from model.data.readers.records import BYTE_ORDER_MARK, DamagedFile, replace_surrogates

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
# What text that looks like nothing known is most often in; every byte but five is a character there.
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
    if encoding in ("utf-16", "utf-32"):  # which Python decodes only where a mark tells the order of the bytes
        marked = marked_encoding(head)
        encoding = marked if marked.startswith(encoding) else f"{encoding}-le"
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


def guess_encoding(data: bytes, is_html: bool = False) -> str:
    """Returns what an HTML page says that its encoding is, or what uchardet takes it for; named as browsers read it."""
    name = detect_encoding(data, max_len=_EVIDENCE_BYTES, html5_compatible=False, from_html_meta=is_html) or _FALLBACK
    try:
        return codecs.lookup(map_encoding_to_html5(name, fallback_utf8=False) or name).name
    except LookupError:
        return _FALLBACK


def _wide_encoding(head: bytes) -> str:
    """Returns UTF-16 or UTF-32 without a mark, or an empty string.

    A space, a newline or a Latin letter has a zero in a place where hardly any character of a text has none. That
    place is below 9 in every letter of an alphabet; text in Han characters, where it is not, is no UTF-8.
    """
    is_utf8 = _decodes(head, "utf-8")
    for encoding, (width, zero_place, other_place) in _WIDE.items():
        upper = head[zero_place::width]
        zeros = upper.count(0)
        if zeros <= _MIN_ZERO_SHARE * len(upper) or zeros <= 10 * head[other_place::width].count(0):
            continue
        if is_utf8 and 2 * len(upper.translate(None, bytes(range(9)))) > len(upper):
            continue
        if _decodes(head, encoding):
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
    return guess_encoding(evidence)


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
