"""Web pages as text: HTML files, and the responses and conversions in WARC and WET files."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str

from model.data.readers.blocks import BlockReader, joined_blocks
from model.data.readers.charsets import html_encoding, marked_encoding
from model.data.readers.records import DamagedFile, Dropped, decoded, dropped, replace_surrogates

_HTML_TYPES = ("text/html", "application/xhtml+xml")
_PAGES = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.revisit

# Finding the main content takes time quadratic in the depth of these: 1 s at 8,000, hours at a million.
_CONTAINER = re.compile(r"<(/?)(?:div|article|ol)\b", re.IGNORECASE)
_MAX_DEPTH = 1000


def html_texts(
    blocks: Iterable[bytes], encoding: str, max_bytes: int, on_encoding: Callable[[str], None]
) -> Iterator[str | Dropped]:
    """Yields the main text of an HTML file."""
    page = joined_blocks(blocks, max_bytes)
    yield page if isinstance(page, Dropped) else _page_text(page, encoding, "", on_encoding)


def warc_texts(
    blocks: Iterable[bytes], encoding: str, max_bytes: int, on_encoding: Callable[[str], None]
) -> Iterator[str | Dropped]:
    """Yields the main text of each HTML response, and each conversion as it is. What is about pages is no record.

    Args:
        blocks: The file.
        encoding: Of all pages; empty for what each of them says or looks like.
        max_bytes: Of a record as it is stored, and of a page without its HTTP encodings.
        on_encoding: Called with each page's encoding.

    Raises:
        DamagedFile: After the last whole record before the damage.
    """
    try:
        for record in ArchiveIterator(BlockReader(blocks), parse_http=False, stream_detect=False):
            if not (record.headers.get("Content-Length") or "").isdigit():
                raise DamagedFile("a record has no Content-Length")
            uri = record.headers.get("WARC-Target-URI") or ""
            size = record.content_length
            is_text = record.record_type == WarcRecordType.conversion
            is_wanted = is_text or record.record_type & _PAGES
            if not is_wanted or size > max_bytes:
                if record.consume() < size:
                    raise DamagedFile("it ends inside a record")
                if is_wanted:
                    yield dropped("too_long", uri)
                continue
            content = record.reader.read(size)
            if len(content) < size:
                raise DamagedFile("it ends inside a record")
            content_type = record.headers.get("Content-Type") or ""
            if is_text:
                yield decoded(content) if content_type.startswith("text/") else dropped("not_text", uri)
            elif record.record_type == WarcRecordType.revisit:
                yield dropped("revisit", uri)
            elif record.is_http:
                yield _response_text(content, uri, encoding, max_bytes, on_encoding)
            elif _is_html(content_type, content):
                yield _page_text(content, encoding, "", on_encoding)
            else:
                yield dropped("not_html", f"{uri} {content_type}")
    except OSError as error:
        if error.errno is not None:  # the disk or the network, not the file
            raise
        raise DamagedFile(str(error)) from error


def _response_text(
    content: bytes, uri: str, encoding: str, max_bytes: int, on_encoding: Callable[[str], None]
) -> str | Dropped:
    """Returns the text of an HTTP response."""
    # The record's own reader cannot go on to the next record when a response is malformed.
    try:
        response = _parsed_response(content, auto_decode="all")
        page = response.reader.read(max_bytes + 1)
    except OSError:
        # Some crawlers store the decoded body under the headers that tell how it was encoded.
        try:
            response = _parsed_response(content, auto_decode="none")
            page = response.reader.read(max_bytes + 1)
        except OSError:
            return dropped("bad_http", uri)
        if not page.lstrip().startswith(b"<"):
            return dropped("bad_http", uri)
    status, content_type = response.http_headers.status_code, response.http_content_type or ""
    if status is None:
        return dropped("bad_http", uri)
    if status != 200:
        return dropped("http_status", f"{status} {uri}")
    if not _is_html(content_type, page):
        return dropped("not_html", f"{uri} {content_type}")
    if len(page) > max_bytes:
        return dropped("too_long", uri)
    return _page_text(page, encoding, response.http_charset or "", on_encoding)


def _parsed_response(content: bytes, auto_decode: Literal["none", "all"]) -> WarcRecord:
    response = WarcRecord()
    response.set_bytes_content(content)
    response.is_http = True
    response.parse_http(auto_decode=auto_decode)
    return response


def _is_html(content_type: str, page: bytes) -> bool:
    if content_type:
        return content_type.split(";")[0].strip().lower() in _HTML_TYPES
    return page[:1024].lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _page_text(page: bytes, encoding: str, http_charset: str, on_encoding: Callable[[str], None]) -> str | Dropped:
    """Returns the main text of a page in the given encoding, or in the one that it tells or looks like."""
    encoding = encoding or marked_encoding(page) or html_encoding(page, http_charset)
    on_encoding(encoding)
    html = replace_surrogates(bytes_to_str(page, encoding, errors="replace", fallback_encodings=()))
    if _depth(html) > _MAX_DEPTH:
        return dropped("too_deep", html)
    text = extract_plain_text(html, main_content=True, alt_texts=False)
    return text if text.strip() else dropped("no_main_text", html)


def _depth(html: str) -> int:
    depth = deepest = 0
    for tag in _CONTAINER.finditer(html):
        depth = max(0, depth - 1) if tag[1] else depth + 1
        deepest = max(deepest, depth)
    return deepest
