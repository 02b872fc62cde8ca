"""Character encodings: detected, given, reported, and damaged."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import COMPRESS, encodings_of, json_lines, read

from model.data.config import SourceConfig
from model.data.readers.documents import Dropped

# Article 1 of the Universal Declaration of Human Rights.
ARTICLES = {
    "cp1252": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison.\n",
    "cp1250": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni.\n",
    "cp1251": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом.\n",
    "koi8-r": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом.\n",
    "cp1253": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.\n",
    "gb18030": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。\n",
    "big5": "人人生而自由，在尊嚴和權利上一律平等。他們賦有理性和良心，並應以兄弟關係的精神相對待。\n",
    "cp932": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。\n",
    "cp949": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로.\n",
}


@pytest.mark.parametrize("encoding", ARTICLES)
def test_legacy_encodings_are_detected(encoding: str) -> None:
    text = 5 * ARTICLES[encoding]
    assert read("x.txt", text.encode(encoding)) == [text]
    assert read("x.jsonl.gz", COMPRESS[".gz"](json_lines(text, text).decode().encode(encoding))) == [text, text]
    (found,) = encodings_of("x.txt", text.encode(encoding))
    assert text.encode(found) == text.encode(encoding)


MARKED = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}


@pytest.mark.parametrize("encoding", MARKED)
@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("read_bytes", [1, 3, None])
def test_unicode_encodings_are_detected(encoding: str, has_mark: bool, suffix: str, read_bytes: int | None) -> None:
    def encoded(text: str) -> bytes:
        return COMPRESS.get(suffix, bytes)(has_mark * MARKED[encoding] + text.encode(encoding))

    text = '{"text": "é ½"}\r\n\r\n \n{"text": "naïve 日本 😀 and more"}\n'
    assert read("x.jsonl" + suffix, encoded(text), read_bytes=read_bytes) == ["é ½", "naïve 日本 😀 and more"]
    assert read("x.txt" + suffix, encoded(text), read_bytes=read_bytes) == [text]
    table = 'text,n\n"é, ""½""\n",1\nand more,2'
    assert read("x.csv" + suffix, encoded(table), read_bytes=read_bytes) == ['é, "½"\n', "and more"]
    assert encodings_of("x.txt" + suffix, encoded(text)) == [encoding]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("article", ["cp1251", "cp1253", "cp1250", "cp949"])
def test_other_scripts_without_a_mark(encoding: str, article: str) -> None:
    assert encodings_of("x.txt", ARTICLES[article].encode(encoding)) == [encoding]


def test_zeros_in_ascii_are_not_utf16() -> None:
    assert read("x.txt", b"\0\nan odd zero in a line", txt_document="line") == ["\0", "an odd zero in a line"]
    assert read("x.txt", bytes(64)) == [64 * "\0"]


# Article 1 again, in scripts that have few zeros in UTF-16.
PROSE = {
    "Chinese": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "Japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "Khmer": "មនុស្សទាំងអស់កើតមកមានសេរីភាពនិងសមភាពក្នុងសេចក្ដីថ្លៃថ្នូរនិងសិទ្ធិ។",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "Georgian": "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებითა და უფლებებით.",
}


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("language", PROSE)
def test_prose_without_a_mark(encoding: str, language: str) -> None:
    text = PROSE[language]
    for lines in (text, text + "\n", 90 * (text + "\n")):
        assert read("x.txt", lines.encode(encoding)) == [lines]
        assert encodings_of("x.txt", lines.encode(encoding)) == [encoding]
    assert read("x.jsonl", json_lines(text, text).decode().encode(encoding)) == [text, text]
    assert read("x.csv", f"text,n\n{text},1\n".encode(encoding)) == [text]
    page = f"<html><body><p>{text}</p></body></html>"
    assert read("x.html", page.encode(encoding)) == [text]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_damage_in_utf16_without_a_mark(encoding: str) -> None:
    text = 9 * (PROSE["Chinese"] + "\n")
    lone = "\ud83d".encode(encoding, "surrogatepass")
    assert read("x.txt", text.encode(encoding) + lone + "\n".encode(encoding)) == [text + "\ufffd\n"]
    assert read("x.txt", text.encode(encoding)[:-1]) == [text[:-1] + "\ufffd"]


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
@pytest.mark.parametrize("place", range(8))
def test_stray_zeros_are_not_utf16(encoding: str, place: int) -> None:
    # 96 characters, of which none becomes a part of another.
    article = ARTICLES["cp1252"]
    for text in (article[:place] + "\0" + article[place:], 9 * (article[: 2 * place] + "\0" + article[place:])):
        assert read("x.txt", text.encode(encoding)) == [text]
        assert encodings_of("x.txt", text.encode(encoding)) == [encoding]
    table = "1\t2\t3\t4\t5\n" * 20
    assert read("x.txt", (table[:place] + "\0" + table[place:]).encode()) == [table[:place] + "\0" + table[place:]]
    paths = 20 * "usr/share/doc\0"
    assert read("x.txt", paths[place:].encode()) == [paths[place:]]


ICELANDIC = "Hver maður er borinn frjáls og jafn öðrum að virðingu og réttindum. Það er gæddur þeim, ý og Þór.\n"
TURKISH = "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. Akıl ve vicdana sahiptirler, Málaga.\n"
UKRAINIAN = "Всі люди народжуються вільними і рівними у своїй гідності та правах. Ґанок, її ґрунт і Європа.\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (ICELANDIC, "cp1252"),
        (TURKISH, "cp1254"),
        (UKRAINIAN, "koi8-u"),
        ("╔═══════╗\n║ люди  ║\n╟───────╢\n║рождаются║\n╚═══════╝\n" + ARTICLES["koi8-r"], "koi8-r"),
    ],
)
@pytest.mark.parametrize("times", [1, 20])
def test_neighbouring_alphabets_are_told_apart(text: str, encoding: str, times: int) -> None:
    assert encodings_of("x.txt", (times * text).encode(encoding)) == [encoding]
    assert read("x.txt", (times * text).encode(encoding)) == [times * text]


@pytest.mark.parametrize(
    ("text", "encoding"), [('日本 "ABC", ア', "iso2022_jp"), ("ｱｲｳ 日本", "iso2022_jp_ext"), ("한국 ABC", "iso2022_kr")]
)
@pytest.mark.parametrize("read_bytes", [1, None])
def test_escapes_tell_iso_2022(text: str, encoding: str, read_bytes: int | None) -> None:
    ascii_head = 20 * "A line of plain English text.\n"
    for whole in (text, ascii_head + text + "\nand more\n"):
        assert read("x.txt", whole.encode(encoding), read_bytes=read_bytes) == [whole]
    assert read("x.jsonl", json_lines(text, text).decode().encode(encoding), read_bytes=read_bytes) == [text, text]
    page = f"<html><body><p>{text}</p></body></html>"
    assert read("x.html", page.encode(encoding)) == [text]


def test_other_escapes_are_ascii() -> None:
    log = "\x1b[32mok\x1b[0m costs \x1b$ 5, $BAD\n"
    assert read("x.txt", 50 * log.encode()) == [50 * log]
    assert encodings_of("x.txt", log.encode()) == ["utf-8"]
    text = log + PROSE["Japanese"]
    assert read("x.txt", text.encode()) == [text]


@pytest.mark.parametrize("shift", range(5))
def test_an_escape_where_detection_stops_looking(shift: int) -> None:
    head = "\x1b[0m"
    text = head + "x" * ((1 << 20) - len(head) - shift) + "日本 and more"
    assert read("x.txt", text.encode("iso2022_jp"), limit=2 << 20) == [text]


def test_a_mark_alone_is_an_empty_file() -> None:
    for mark in MARKED.values():
        assert read("x.jsonl", mark) == read("x.csv", mark) == read("x.json", mark) == []
        assert read("x.txt", mark) == [""]


def test_cut_utf16_loses_one_character() -> None:
    data = "a line\nmore of it\n".encode("utf-16")
    assert read("x.txt", data[:-1], txt_document="line") == ["a line", "more of it\ufffd"]


def test_lone_surrogates_in_utf16() -> None:
    data = "a \ud83d b\n".encode("utf-16", "surrogatepass")
    assert read("x.txt", data) == ["a \ufffd b\n"]


def test_a_cut_character_is_still_utf8() -> None:
    data = ("é" * 100).encode()[:-1]
    assert read("x.txt", data) == ["é" * 99 + "\ufffd"]
    assert encodings_of("x.txt", data) == ["utf-8"]
    # Cut where detection stops looking, and whole.
    long = "x" + "é" * (1 << 19)
    assert read("x.txt", long.encode(), limit=2 << 20) == [long]


def test_few_faults_are_damaged_utf8() -> None:
    assert read("x.txt", b"a\xffb\xe2\x82") == ["a\ufffdb\ufffd"]
    assert read("x.jsonl", b'{"text": "a\xff"}\n') == ["a\ufffd"]
    data = 20 * "déjà vu; ".encode() + 10 * b"caf\xe9; "
    assert read("x.txt", data) == [20 * "déjà vu; " + 10 * "caf\ufffd; "]
    assert encodings_of("x.txt", data) == ["utf-8"]


# The characters of Windows-1252 by their bytes: https://encoding.spec.whatwg.org/index-windows-1252.txt
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"caf\xe9", "café"),
        (b"LIBERT\xc9!", "LIBERTÉ!"),
        (b"Gr\xf6\xdfe", "Größe"),
        (b"\xe0 la carte", "à la carte"),
        (b"a \x93quote\x94", "a “quote”"),
        (b"the \x91other\x92", "the ‘other’"),
        (b"it\x92s", "it’s"),
        (b"\xab le mot \xbb", "« le mot »"),
        (b"\xbfqu\xe9?", "¿qué?"),
        (b"one \x96 two\x97three", "one – two—three"),
        (b"wait\x85", "wait…"),
        (b"the \x93caf\xe9\x94", "the “café”"),
        (b"le mot d'\xe9t\xe9\xbb", "le mot d'été»"),
        (b"a\xa0b", "a\xa0b"),
        (b"20 \xb0C, \xa35, \xa9 2003", "20 °C, £5, © 2003"),
        (b"c\x9cur", "cœur"),
        # In Windows-1250 it is się, in ISO 8859-15 5 €: of so little text, nothing tells.
        (b"si\xea", "siê"),
        (b"5 \xa4", "5 ¤"),
        (b"caf\xe9 a\xffb \x81", "café aÿb \ufffd"),
    ],
)
@pytest.mark.parametrize("read_bytes", [1, None])
def test_few_characters_of_windows_1252(data: bytes, text: str, read_bytes: int | None) -> None:
    english = 1000 * "A line of plain English text, which is the same everywhere.\n"
    for before in ("", english):
        found = before + text + "\n" + before
        data_around = before.encode() + data + b"\n" + before.encode()
        assert read("x.txt", data_around, read_bytes=read_bytes) == [found]
        assert encodings_of("x.txt", data_around) == ["cp1252"]
    assert read("x.txt", data) == [text]
    record = b'{"text": "' + data + b'"}\n'
    assert read("x.jsonl", record) == read("x.json", record) == [text]
    assert read("x.csv", b'text,n\n"' + data + b'",1\n') == [text]
    assert read("x.txt", 2 * (data + b"\n"), txt_document="line") == 2 * [text]


@pytest.mark.parametrize(
    "data",
    [
        b"a\xffb",
        b"a \xff\xff\xfe\x81\x8d\x8f\x90\x9d b",
        b"caf\x8e",  # é on a Macintosh; Ž in Windows-1252
        b"caf\x82 noir",  # é in DOS; ‚ in Windows-1252
        b"Gr\x94\xe1e",  # Größe in DOS
        b"it\xd5s",  # it’s on a Macintosh
        b"a word \xc8\xcb here",  # a character of GB 18030
        b"\xe9",
    ],
)
def test_few_other_bytes_are_damage(data: bytes) -> None:
    assert read("x.txt", data) == [data.decode(errors="replace")]
    assert encodings_of("x.txt", data) == ["utf-8"]


@pytest.mark.parametrize("character", ["é", "’", "ł", "日", "😀"])
def test_a_cut_character_is_no_other_encoding(character: str) -> None:
    for cut in range(1, len(character.encode())):
        data = b"the word " + character.encode()[:cut]
        assert read("x.txt", data) == ["the word \ufffd"]
        assert encodings_of("x.txt", data) == ["utf-8"]


def test_one_valid_character_is_utf8() -> None:
    for faults in (1, 2, 5):
        data = "déjà".encode() + faults * b" caf\xe9"
        assert read("x.txt", data) == ["déjà" + faults * " caf\ufffd"]
        assert encodings_of("x.txt", data) == ["utf-8"]
    # In capitals, a quotation mark makes É a valid character by chance: U+0254.
    data = "Café, né, passé, clé, blé, thé, pré, gré, été: “LIBERTÉ” et santé".encode("cp1252")
    assert read("x.txt", data) == [data.decode("cp1252")]


@pytest.mark.parametrize("word", ["naïve", "señor", "Brand®", "façade", "Müller"])
def test_many_of_few_characters(word: str) -> None:
    text = 200 * f"A plain line with {word} in it.\n"
    assert read("x.txt", text.encode("cp1252")) == [text]


def test_what_comes_late_is_not_lost() -> None:
    english = 20_000 * "A line of plain English text, which is the same in every encoding looked for.\n"

    def lines_of(*parts: bytes) -> list[str | Dropped]:
        data = b"".join(part + b"\n" + english.encode() for part in parts)
        lines = read("x.txt", data, limit=1 << 30, txt_document="line")
        return [line for line in lines if isinstance(line, str) and not line.startswith("A line")]

    assert lines_of(b"", b"caf\xe9", b"", b"na\xefve") == ["café", "naïve"]
    assert lines_of(b"a\xffb", b"caf\xe9") == ["a\ufffdb", "café"]
    assert lines_of(b"caf\xe9", "déjà".encode(), b"caf\xe9") == ["café", "déjà", "caf\ufffd"]


@pytest.mark.parametrize("shift", range(-4, 3))
@pytest.mark.parametrize("word", [b"caf\xe9 noir", b"a \x93quote\x94", b"one \x96 two"])
def test_a_character_where_detection_stops_looking(word: bytes, shift: int) -> None:
    head = b"\xe9t\xe9 "
    data = head + b"x" * ((1 << 20) - len(head) - len(word) - shift) + b" " + word + b" and more"
    assert read("x.txt", data, limit=2 << 20) == [data.decode("cp1252")]


def test_a_window_of_nothing_but_faults() -> None:
    for filler in (b"\xff", b"\xa0"):
        data = b"caf\xe9 " + (3 << 20) * filler + b" caf\xe9"
        (text,) = read("x.txt", data, limit=16 << 20)
        assert isinstance(text, str)
        assert text.startswith("café ")
        assert text.endswith(" café")


@settings(deadline=None)
@given(
    text=st.lists(st.sampled_from(["café ", "it’s ", "plain ", "20 °C ", "naïve\n"])).map("".join),
    places=st.lists(st.integers(0, 200), max_size=3),
    read_bytes=st.integers(1, 9),
)
def test_blocks_do_not_change_what_is_detected(text: str, places: list[int], read_bytes: int) -> None:
    data = bytearray(text.encode("cp1252"))
    for place in places:
        data[place : place + 1] = b"\xff"
    assert read("x.txt", bytes(data), read_bytes=read_bytes) == read("x.txt", bytes(data))


def test_what_follows_a_long_ascii_head_decides() -> None:
    head = 20_000 * "A line of plain English text, which is the same in every encoding looked for.\n"
    tail = 20 * ARTICLES["cp1252"]
    assert len(head) > 1 << 20
    assert read("x.txt", (head + tail).encode("cp1252"), limit=4 << 20) == [head + tail]
    assert encodings_of("x.txt", (head + tail).encode("cp1252"), txt_document="line") == ["cp1252"]
    assert encodings_of("x.txt", (head + tail).encode(), txt_document="line") == ["utf-8"]


def test_ascii_is_reported_as_utf8() -> None:
    assert encodings_of("x.txt", b"plain") == encodings_of("x.csv", b"text\nplain\n") == ["utf-8"]


def test_the_given_encoding_overrides() -> None:
    data = json_lines("é")
    assert read("x.jsonl", data, encoding="latin-1") == ["Ã©"]
    assert encodings_of("x.jsonl", data, encoding="latin-1") == ["iso8859-1"]
    assert read("x.jsonl", b'{"text": "\x8e"}', encoding="mac-roman") == ["é"]
    assert read("x.txt", b"a\xff", encoding="ascii") == ["a\ufffd"]
    assert read("x.html", b"<meta charset=utf-8><p>\xc3\xa9</p>", encoding="cp1251") == ["Г©"]


@pytest.mark.parametrize("encoding", ["utf-7", "shift_jis", "hz", "iso2022_jp", "utf-16", "utf-8-sig", "cp037"])
@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_no_bytes_are_too_odd_for_a_decoder(encoding: str, data: bytes) -> None:
    (text,) = read("x.txt", data, encoding=encoding, read_bytes=3)
    assert isinstance(text, str)
    text.encode()


@pytest.mark.parametrize("encoding", ["base64", "rot13", "idna", "undefined", "utf-9"])
def test_what_decodes_no_text_is_refused(encoding: str) -> None:
    with pytest.raises(ValueError, match=f"'{encoding}' is no encoding of text"):
        SourceConfig(uri="x", encoding=encoding)


def test_records_too_long_count_in_utf8() -> None:
    data = "日本\nab\n".encode("utf-16")  # four bytes each line; six and two in UTF-8
    assert read("x.txt", data, limit=5, txt_document="line") == [Dropped("too_long"), "ab"]
