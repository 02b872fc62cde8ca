"""Web pages: HTML files, WARC and WET files."""

import gzip
import zlib
from pathlib import Path

import pytest
from source_files import COMPRESS, encodings_of, read, read_until_damage

from model.data.readers.documents import Dropped

SAMPLES = Path(__file__).parent.parent.parent / "shared" / "data" / "documents"

PAGE = (
    "<!DOCTYPE html><html><head><title>T</title><style>p {}</style></head><body><nav><a href='/'>Menu</a></nav>"
    "<article><h1>Title</h1><p>First &amp; best.</p><p>Second: é, €.</p><script>x</script></article>"
    "<footer>Imprint</footer></body></html>"
)
TEXT = "Title\n\nFirst & best.\n\nSecond: é, €."


def record(kind: str, content: bytes, content_type: str = "application/http; msgtype=response") -> bytes:
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://example.org/\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


def response(body: bytes, *headers: str, status: str = "200 OK", content_type: str = "text/html") -> bytes:
    lines = [f"HTTP/1.1 {status}", *([f"Content-Type: {content_type}"] if content_type else []), *headers]
    return record("response", "\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def test_the_main_text_of_a_page() -> None:
    assert read("x.html", PAGE.encode()) == read("x.HTM.gz", gzip.compress(PAGE.encode())) == [TEXT]


@pytest.mark.parametrize(
    ("head", "encoding"),
    [("", "utf-8"), ("<meta charset=iso-8859-15>", "iso8859-15"), ("<meta charset=iso-8859-1>", "utf-8")],
)
def test_a_page_says_its_encoding(head: str, encoding: str) -> None:
    page = PAGE.replace("<head>", "<head>" + head)
    assert read("x.html", page.encode(encoding)) == [TEXT]
    assert encodings_of("x.html", page.encode(encoding)) == [encoding]
    assert read("x.html", page.encode("utf-16")) == [TEXT]


@pytest.mark.parametrize("head", ["", "<meta charset=utf-8>", "<meta charset=iso-8859-1>"])
def test_one_byte_of_a_page_in_windows_1252(head: str) -> None:
    page = PAGE.replace("<head>", "<head>" + head).replace("é, €", "café")
    assert read("x.html", page.encode("cp1252")) == [TEXT.replace("é, €", "café")]
    assert encodings_of("x.html", page.encode("cp1252")) == ["cp1252"]
    header = "text/html; charset=utf-8"
    assert read("x.warc", response(page.encode("cp1252"), content_type=header)) == [TEXT.replace("é, €", "café")]
    assert read("x.html", page.replace("é", "\N{KELVIN SIGN}").encode()[:-1]) == [TEXT.replace("é, €", "caf\u212a")]


def test_a_page_in_ascii_is_reported_as_what_it_says() -> None:
    assert encodings_of("x.html", PAGE.encode("ascii", "ignore")) == ["utf-8"]
    assert encodings_of("x.html", b"<meta charset=koi8-r>" + PAGE.encode("ascii", "ignore")) == ["koi8-r"]


def test_pages_that_give_no_text() -> None:
    assert read("x.html", b"<html><title>Only a title</title>") == [Dropped("no_main_text")]
    assert read("x.html", b"") == [Dropped("no_main_text")]
    assert read("x.html", PAGE.encode(), limit=100) == [Dropped("too_long")]
    assert read("x.html", b"<div>" * 1001 + b"deep") == [Dropped("too_deep")]
    assert read("x.html", b"<div>" * 1000 + b"deep") == ["deep"]
    assert read("x.html", b"<div>\n</DIV>" * 5000 + b"<p>wide") == ["wide"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("read_bytes", [7, None])
def test_responses_and_what_is_none(suffix: str, read_bytes: int | None) -> None:
    body = PAGE.encode()
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:100], body[100:], b""))
    zipped = gzip.compress(body)
    records = [
        record("warcinfo", b"software: x\r\n", "application/warc-fields"),
        record("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
        response(body, content_type="text/html; charset=utf-8"),
        response(PAGE.encode("cp1252"), content_type="Text/HTML; charset=ISO-8859-1"),
        response(chunked, "Transfer-Encoding: chunked"),
        response(zipped, "Content-Encoding: gzip", content_type="application/xhtml+xml"),
        response(zlib.compress(body), "Content-Encoding: deflate"),
        response(
            b"%x\r\n%b\r\n0\r\n\r\n" % (len(zipped), zipped), "Content-Encoding: gzip", "Transfer-Encoding: chunked"
        ),
        response(body, "Content-Encoding: gzip"),  # some crawlers store what they decoded
        response(body, content_type=""),
        response(b"binary", "Content-Encoding: gzip"),
        response(b"{}", content_type="application/json"),
        response(b"plain", content_type=""),
        response(body, status="404 Not Found"),
        response(b"", status="301 Moved"),
        record("response", b"no HTTP at all"),
        record("revisit", b"HTTP/1.1 200 OK\r\n\r\n"),
        record("resource", body, "text/html"),
        record("resource", b"a log", "text/plain"),
        record("metadata", b"x: y", "application/warc-fields"),
    ]
    # One member a record, as crawlers write it.
    data = b"".join(map(COMPRESS.get(suffix, bytes), records))
    reasons = ["bad_http", "not_html", "not_html", "http_status", "http_status", "bad_http", "revisit"]
    expected = [*(8 * [TEXT]), *map(Dropped, reasons), TEXT, Dropped("not_html")]
    found = read("x.warc" + suffix, data, read_bytes=read_bytes)
    assert found == expected
    assert {record.sample for record in found if isinstance(record, Dropped) and record.reason == "http_status"} == {
        "404 http://example.org/", "301 http://example.org/",
    }  # fmt: skip
    assert encodings_of("x.warc" + suffix, data) == ["utf-8", "cp1252", *(7 * ["utf-8"])]


@pytest.mark.parametrize("name", ["x.wet", "CC-MAIN-0000.warc.wet", "x.warc"])
def test_conversions_are_taken_as_they_are(name: str) -> None:
    texts = ["Title\nA line, é €.\n", "", "\ufeffmarked"]
    data = b"".join(record("conversion", text.encode(), "text/plain") for text in texts)
    data += record("conversion", b"\xff\xd8", "image/jpeg") + record("conversion", b"bad \xff", "text/plain")
    expected = ["Title\nA line, é €.\n", "", "marked", Dropped("not_text"), "bad \ufffd"]
    assert read(name, data) == expected
    assert read(name + ".gz", gzip.compress(data)) == expected


def test_long_records_are_skipped() -> None:
    long = record("conversion", b"x" * 5000, "text/plain")
    bomb = response(gzip.compress(b"<p>" + b"x" * 5000), "Content-Encoding: gzip")
    data = long + record("request", b"y" * 5000) + bomb + record("conversion", b"z" * 1000, "text/plain")
    assert read("x.warc", data, limit=1000) == [Dropped("too_long"), Dropped("too_long"), "z" * 1000]
    # A size that no memory holds.
    lie = long.replace(b"Content-Length: 5000", b"Content-Length: 99999999999999999")
    assert read_until_damage("x.warc", lie)[0] == []


def test_cut_and_damaged_files() -> None:
    one = record("conversion", b"one", "text/plain")
    two = record("conversion", b"a longer second text", "text/plain")
    for cut in range(5, len(two) - 4):
        records, message = read_until_damage("x.wet", one + two[:-cut])
        assert records == ["one"]
        assert message.startswith("x.wet: ")
    assert read_until_damage("x.wet", one + record("request", b"x" * 100)[:-10])[0] == ["one"]
    zipped = gzip.compress(one) + gzip.compress(two)
    assert read_until_damage("x.wet.gz", zipped[:-1])[0] == ["one", "a longer second text"]
    assert read_until_damage("x.wet.gz", zipped[:-20])[0] == ["one"]
    assert read_until_damage("x.wet", one + b"garbage\r\n\r\n" + two)[0] == ["one"]
    assert read_until_damage("x.warc", b"no WARC at all")[0] == []
    assert read("x.warc", b"") == []


def test_common_crawl_samples() -> None:
    if not SAMPLES.exists():
        pytest.skip("no ../shared/data beside the repository")
    name = "sample-0000.warc.gz"
    found = read(name, (SAMPLES / name).read_bytes())
    texts = [record for record in found if isinstance(record, str)]
    # The notes that come with the file count 22 responses.
    assert len(texts) == 22
    assert texts[0].startswith("Meet Our Team\n\nSemantic Scholar Research Team\n\nWe are an interdisciplinary")
    assert [record.reason for record in found if isinstance(record, Dropped)] == ["not_html", "not_html"]  # wget's logs
