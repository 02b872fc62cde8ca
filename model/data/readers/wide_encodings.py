"""UTF-16 and UTF-32 without a byte order mark, told from encodings in which ASCII characters are single bytes."""

import unicodedata
from collections import Counter

# Bytes of a character, and the place of the upper one: the highest of UTF-16, and in UTF-32 one that is always zero.
_WIDE = {"utf-32-le": (4, 3), "utf-32-be": (4, 0), "utf-16-le": (2, 1), "utf-16-be": (2, 0)}

# Those that text in single bytes has no use for: ESC is in logs with colours, and DOS ended files with SUB.
_CONTROLS = bytes(byte for byte in range(0x20) if byte not in b"\t\n\f\r\x1a\x1b")
_MIN_SHARE = 0.01
_MIN_SHARE_IN_UTF8 = 0.05  # a table of digits between tabs is much like Hindi
_MIN_BYTES_IN_UTF8 = 32  # a few control characters could be anything
_ALL_CONTROLS = bytes(range(0x20))
_LETTERS = b" abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_LETTER_SHARE = 0.6

# Control characters, surrogates, those for private use, and those that are none.
_NO_TEXT = frozenset(("Cc", "Cs", "Co", "Cn"))


def wide_encoding(head: bytes, is_utf8: bool) -> str:
    """Returns UTF-16 or UTF-32 without a mark, or an empty string.

    Control characters are no part of text, but their bytes are a part of characters in UTF-16: the upper byte of every
    letter of most alphabets, or one lower byte in eight of Han characters; and so are zeros, of newlines and spaces.
    Where there are such bytes, the order is right in which the characters are text. Stray zeros are fewer, or in text
    that single bytes tell: most of those are Latin letters, or they are UTF-8.

    Args:
        head: The start of the file.
        is_utf8: Whether it is valid UTF-8.
    """
    if is_utf8 and len(head) < _MIN_BYTES_IN_UTF8 and 0 not in head:
        return ""
    if _count(head, _CONTROLS) <= (_MIN_SHARE_IN_UTF8 if is_utf8 else _MIN_SHARE) * len(head):
        return ""
    if _count(head, _LETTERS) > _MAX_LETTER_SHARE * len(head):
        return ""
    ranks: dict[str, tuple[int, int]] = {}
    for encoding, (width, upper_place) in _WIDE.items():
        upper = head[upper_place::width]
        if is_utf8 and 2 * _count(upper, _ALL_CONTROLS) <= len(upper):
            continue
        # A character that is cut at the end is left out.
        text = head[: len(head) // width * width].decode(encoding, errors="replace")
        zeros, faults = upper.count(0), _count_faults(text)
        if text and faults <= max(len(text) // 100, zeros // 10):
            ranks[encoding] = (zeros - faults, -len(set(upper)))
    return max(ranks, key=ranks.__getitem__, default="")


def _count(data: bytes, counted: bytes) -> int:
    return len(data) - len(data.translate(None, counted))


def _count_faults(text: str) -> int:
    return sum(count for character, count in Counter(text).items() if not _is_text(character))


def _is_text(character: str) -> bool:
    return character != "\ufffd" and (character.isspace() or unicodedata.category(character) not in _NO_TEXT)
