"""Character encodings of text files: detected from their first bytes, and brought to UTF-8 block by block."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

from model.data.readers.records import BYTE_ORDER_MARK, DamagedFile, replace_surrogates
from model.data.readers.wide_encodings import wide_encoding
from model.data.readers.windows1252 import judge_faults

# The mark of UTF-16-LE starts that of UTF-32-LE, which therefore comes first.
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
# What text that looks like nothing known is most often in; every byte but five is a character there.
_FALLBACK = "cp1252"

_HEAD_BYTES = 1 << 20
_EVIDENCE_BYTES = 1 << 16
# Fewer bytes that are no UTF-8 than this are damage, unless they are the letters and marks of Windows-1252.
_MIN_FAULTS = 3
# Of fewer different characters, frequencies tell nothing: uchardet takes English with nothing but "naïve" for cp852.
_MIN_KINDS = 4
# Where the letters of Windows-1252 stand in place, those of the alphabets of DOS and of other scripts do not.
_LATIN_ALPHABETS = frozenset(
    ("cp1250", "cp1254", "cp1257", "cp1258", "iso8859-2", "iso8859-13", "iso8859-15", "iso8859-16")
)

# The letters of Icelandic that Turkish has not, and those that stand in place of the Turkish ı and İ: ý and Ý.
_NOT_TURKISH = "æáíóúÆÁÍÓÚ".encode("cp1252")
_TURKISH_I = "ıİ".encode("cp1254")
# Ukrainian letters between others, where KOI8-R has what boxes are drawn with.
_KOI8_U = re.compile(b"(?<=[\xc0-\xff])[%b](?=[\xc0-\xff])" % "єіїґЄІЇҐ".encode("koi8-u"))

# What switches from ASCII to other characters, and some of these: two bytes that look like ASCII each, or in half-width
# katakana one. Sources: RFC 1468, RFC 1557 and, for the katakana, https://encoding.spec.whatwg.org/#iso-2022-jp.
_SWITCHES = {
    "iso2022_jp_ext": re.compile(rb"\x1b(?:\$(?:[@B]|\(D)(?:[!-~]{2})+|\(I[!-_]+)"),
    "iso2022_kr": re.compile(rb"\x1b\$\)C|\x0e(?:[!-~]{2})+\x0f"),
}
_ESCAPE = b"\x1b"
_CUT_SWITCH = re.compile(rb"\x1b[ -~]{0,5}\Z")

_NON_ASCII = bytes(range(0x80, 0x100))
_TELLING_BYTE = re.compile(rb"[\x80-\xff\x1b]")
# A character of UTF-8 that has fewer bytes than its first one tells.
_CUT_CHARACTER = rb"(?=[\xc2-\xf4]\Z|[\xe0-\xf4].\Z|[\xf0-\xf4]..\Z)%b[\x80-\xbf]*\Z"
_CUT_BY_LIMIT = re.compile(_CUT_CHARACTER % b".", re.DOTALL)
# At the end of a file, "caf\xe9" is not cut; "caf\xc3" is, as what Latin letters, marks and emoji begin with may be.
_CUT_BY_END = re.compile(_CUT_CHARACTER % rb"(?:(?<![A-Za-z]).|[\xc2-\xc5\xe2\xef\xf0])", re.DOTALL)


def as_utf8(blocks: Iterable[bytes], encoding: str, on_encoding: Callable[[str], None]) -> Iterator[bytes]:
    """Yields the same text in UTF-8 without a byte order mark; what the encoding cannot decode becomes U+FFFD.

    Bytes of a file in UTF-8 are passed on as they are, invalid ones included.

    Args:
        blocks: The file.
        encoding: Its encoding; empty to detect it: UTF-16 and UTF-32 on the first MiB, others with byte_encoding on the
            MiB from where the file ceases to be ASCII or has an escape. What that finds may hold for that MiB alone;
            then the next one with such a byte is judged by itself.
        on_encoding: Called with the encoding's name, once; of several, the first that is not ASCII.

    Raises:
        DamagedFile: What `blocks` raises, after the text before.
    """
    blocks = iter(blocks)
    head, damage = _read_head(blocks)
    blocks = _resumed(head, damage, blocks)
    encoding = encoding or marked_encoding(head) or wide_encoding(head, _decodes(head, "utf-8"))
    if not encoding:
        yield from _detected(blocks, on_encoding)
        return
    if encoding in ("utf-16", "utf-32"):  # which Python decodes only where a mark tells the order of the bytes
        marked = marked_encoding(head)
        encoding = marked if marked.startswith(encoding) else f"{encoding}-le"
    on_encoding(encoding)
    yield from _recoded(blocks, encoding)


def byte_encoding(data: bytes, is_end: bool = True) -> tuple[str, bool]:
    """Returns the encoding of text that is neither UTF-16 nor UTF-32, and whether that holds for what follows as well.

    - With escape sequences that switch to Japanese or Korean characters in ASCII bytes it is ISO 2022.
    - With valid characters of several bytes it is UTF-8; bytes that are none are damage. A character that is cut at the
      end is valid.
    - Without such characters, or with no more than may be valid by chance, it is Windows-1252 if most bytes stand where
      their characters there do, letters in words and marks beside words: one é in 50 kB of English is enough. This
      holds for what follows if there are four different ones; then uchardet can tell the alphabets of other languages.
    - Other bytes are damage if they are one or two, or 0xFF and the like, which are no evidence of anything. Then
      nothing tells the encoding, and it is an empty string. What more of them are, uchardet tells.

    Args:
        data: The text, or a part that starts and, unless it is its end, ends between characters.
        is_end: Whether what is cut at the end is missing in the file.
    """
    if escaped := _escaped_encoding(data):
        return escaped, True
    cut = (_CUT_BY_END if is_end else _CUT_BY_LIMIT).search(data[-4:])
    text = data[: len(data) - len(cut[0]) if cut else None].decode("utf-8", errors="surrogateescape")
    faults = judge_faults(text)
    valid = len(text) - len(text.encode("ascii", errors="ignore")) - faults.count + (cut is not None and is_end)
    is_western = faults.in_place > faults.out_of_place
    # By chance, few pairs of bytes are UTF-8 in Western languages, but almost two thirds in an East Asian encoding.
    if valid > (faults.count / 10 if is_western else 2 * faults.count):
        return "utf-8", True
    if is_western and faults.kinds < _MIN_KINDS:
        return _FALLBACK, False
    if not is_western and faults.in_place + faults.out_of_place < _MIN_FAULTS:
        return "", False
    lines = b"\n".join(line for line in data.split(b"\n") if not line.isascii())
    guess = _browser_name(detect_encoding(lines, max_len=_EVIDENCE_BYTES, html5_compatible=False) or _FALLBACK)
    guess = guess if guess in _LATIN_ALPHABETS or not is_western else _FALLBACK
    return _told_apart(guess, lines), True


def html_encoding(page: bytes, http_charset: str) -> str:
    """Returns the encoding of an HTML page without a byte order mark, named as browsers read it.

    It is UTF-16, UTF-32 or ISO 2022 if it looks like that; UTF-8 if it is that and not ASCII; or what its HTTP header
    or itself tells, unless that is UTF-8, which it then is not; or what byte_encoding finds.
    """
    is_ascii, is_utf8 = page.isascii(), _decodes(page, "utf-8")
    if unmistakable := wide_encoding(page, is_utf8) or _escaped_encoding(page):
        return unmistakable
    if is_utf8 and not is_ascii:
        return "utf-8"
    told = map_encoding_to_html5(http_charset, fallback_utf8=False)
    if not told:
        # Where a page tells nothing, this guesses: here ASCII.
        head = page[:_EVIDENCE_BYTES].translate(None, _NON_ASCII)
        found = detect_encoding(head, html5_compatible=False, from_html_meta=True) or "ascii"
        told = "" if found == "ascii" else _browser_name(found)
    if told not in ("", "utf-8"):
        return told
    return byte_encoding(page)[0] or "utf-8"


def marked_encoding(head: bytes) -> str:
    """Returns the encoding that a byte order mark tells, or an empty string."""
    return next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), "")


def _detected(blocks: Iterator[bytes], on_encoding: Callable[[str], None]) -> Iterator[bytes]:
    """Does what as_utf8 does, for a file in an encoding that ASCII is a part of."""
    blocks = chain(blocks, (b"",))
    before = rest = b""  # what was yielded last, and what was not yet
    encoding = ""
    for block in blocks:
        data, rest = rest + block, b""
        found = None if data.isascii() and _ESCAPE not in data else _TELLING_BYTE.search(data)
        ascii_head = data[: found.start()] if found else data
        before = (before + ascii_head)[-2:]
        yield ascii_head
        if not found:
            continue
        window, damage = _read_head(blocks, data[found.start() :])
        is_end = len(window) < _HEAD_BYTES
        judged = window[:_HEAD_BYTES]
        if not is_end:  # what follows a character tells its place, and what follows an escape its meaning
            rest = window[len(_CUT_SWITCH.sub(b"", judged.rstrip(_NON_ASCII)) or judged) :]
        window_encoding, is_settled = byte_encoding(before + judged, is_end)
        encoding = encoding or window_encoding
        if is_settled:
            on_encoding(encoding)
            yield from _recoded(_resumed(window, damage, blocks), window_encoding)
            return
        window = window.removesuffix(rest)
        before = (before + window)[-2:]
        yield window.decode(window_encoding, errors="replace").encode() if window_encoding else window
        if damage:
            raise damage
    on_encoding(encoding or "utf-8")


def _recoded(blocks: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """Yields in UTF-8, without a byte order mark, what is all in one encoding."""
    if encoding == "utf-8":
        yield next(blocks, b"").removeprefix(BYTE_ORDER_MARK)
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    is_first = True
    for data in chain(blocks, (None,)):
        text = decoder.decode(data or b"", final=data is None)
        text = text.removeprefix("\ufeff") if is_first else text
        is_first = is_first and not text
        yield replace_surrogates(text).encode()


def _escaped_encoding(data: bytes) -> str:
    """Returns the ISO 2022 that most escaped characters are in, or an empty string if more bytes are not ASCII."""
    if _ESCAPE not in data:
        return ""
    sizes = {encoding: sum(map(len, switch.findall(data))) for encoding, switch in _SWITCHES.items()}
    encoding = max(sizes, key=sizes.__getitem__)
    return encoding if sizes[encoding] > len(data) - len(data.translate(None, _NON_ASCII)) else ""


def _told_apart(guess: str, lines: bytes) -> str:
    """Returns the guess, or the encoding that uchardet takes for it: it knows no Icelandic and no KOI8-U."""
    if guess == "cp1254":
        foreign, turkish = (len(lines) - len(lines.translate(None, kind)) for kind in (_NOT_TURKISH, _TURKISH_I))
        return _FALLBACK if foreign > turkish else guess
    return "koi8-u" if guess == "koi8-r" and _KOI8_U.search(lines) else guess


def _browser_name(name: str) -> str:
    try:
        return codecs.lookup(map_encoding_to_html5(name, fallback_utf8=False) or name).name
    except LookupError:
        return _FALLBACK


def _decodes(head: bytes, encoding: str) -> bool:
    """Returns whether all of it is valid but for a character that is cut at the end."""
    try:
        codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _read_head(blocks: Iterator[bytes], first: bytes = b"") -> tuple[bytes, DamagedFile | None]:
    """Returns the next MiB of a file, or less where it ends or is damaged before, and the damage."""
    held = [first]
    size = len(first)
    try:
        while size < _HEAD_BYTES and (block := next(blocks, None)) is not None:
            held.append(block)
            size += len(block)
    except DamagedFile as damage:
        return b"".join(held), damage
    return b"".join(held), None


def _resumed(head: bytes, damage: DamagedFile | None, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    if damage:
        raise damage
    yield from blocks
