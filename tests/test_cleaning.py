"""Cleaning text: repair, redaction, and the lines that C4 removes."""

import time

import pytest
from ftfy.badness import MOJIBAKE_CATEGORIES, is_bad
from hypothesis import given, settings
from hypothesis import strategies as st

from model.data.config import C4Config, CleaningConfig
from model.data.filtering.cleaning import _SUSPECT, clean, remove_c4_lines

# Any Unicode string, lone surrogates too.
ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))

AS_IS = CleaningConfig(repair=False)
DEFAULT = CleaningConfig()
REDACT = CleaningConfig(redact=("email", "ip"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\r\nb\rc\nd", "a\nb\nc\nd"),
        ("a\r\r\nb", "a\n\nb"),
        ("page\x0cnext\x0bthird\x85fourth", "page\nnext\nthird\nfourth"),
        ("a\x00b\x07c\x1bd\x7fe\x9ff", "abcdef"),
        ("Ã©", "Ã©"),
        ("a\tb", "a\tb"),
        ("a \t\nb\u00a0\n\u3000\nc", "a\nb\n\nc"),
        ("a\n\n\n\nb\n\nc\n \n\t\nd", "a\n\nb\n\nc\n\nd"),
        ("\n\n  a  \n\n", "a"),
        ("a\ud83db", "a\ufffdb"),
        ("😀 ﬁ ½ e\u0301 \u200d", "😀 ﬁ ½ e\u0301 \u200d"),
        ("a\u2028b", "a\u2028b"),
        ("\x00 \r\n", ""),
        ("", ""),
    ],
)
def test_clean(text: str, expected: str) -> None:
    assert clean(text, AS_IS) == expected


# The texts as they were, in UTF-8 or Windows-1252, decoded with another encoding.
@pytest.mark.parametrize(
    "text",
    [
        "“It’s naïve,” she said — “café”…",
        "Größe über alles: Ärger, Öl, Übung",
        "Привет, мир",
        "l’été à Paris",
        "日本語のテキスト",
        "Wait… and see",
    ],
)
@pytest.mark.parametrize("encoding", ["latin-1", "sloppy-windows-1252"])
def test_text_decoded_with_the_wrong_encoding_is_repaired(text: str, encoding: str) -> None:
    broken = text.encode().decode(encoding)
    assert clean(f"Fine: é.\n{broken}\nFine: 中文", DEFAULT) == f"Fine: é.\n{text}\nFine: 中文"
    assert clean(broken, AS_IS) != text


def test_mojibake_of_mojibake_is_repaired() -> None:
    broken = "café’s".encode().decode("sloppy-windows-1252").encode().decode("sloppy-windows-1252")
    assert clean(broken, DEFAULT) == "café’s"


def test_windows_1252_read_as_latin_1_is_repaired() -> None:
    assert clean("\x93quoted\x94 \x80 5", DEFAULT) == "“quoted” € 5"


@pytest.mark.parametrize(
    "text",
    [
        "&lt;b&gt; &amp; ‘curly’ “quotes” ﬁ ligatures, ｆｕｌｌ　ｗｉｄｔｈ, e\u0301, ½, №, \u200b",
        "(╯°□°)╯︵ ┻━┻",
        "l’œuvre à l’été, Île-de-France, 20 °C, ¿qué?, «сказал», Ünïcödé, São Paulo, ÅÄÖ",
        "Все люди рождаются свободными и равными.",
        "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι.",
        "人人生而自由，在尊严和权利上一律平等。",
    ],
)
def test_nothing_else_is_repaired(text: str) -> None:
    assert clean(text, DEFAULT) == text


MOJIBAKE = "".join(MOJIBAKE_CATEGORIES.values())
WRONG_CHARACTERS = st.from_regex(f"[{MOJIBAKE}aZ1 .\\nвЂГўВØÙàâÂ]{{1,8}}", fullmatch=True)


@settings(max_examples=1000, deadline=None)
@given(WRONG_CHARACTERS)
def test_what_ftfy_calls_mojibake_is_suspect(text: str) -> None:
    assert _SUSPECT.search(text) or not is_bad(text)


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("none", "e\u0301 ﬁ ½ Ａ"), ("NFC", "é ﬁ ½ Ａ"), ("NFKC", "é fi 1⁄2 A")],  # Unicode annex 15
)
def test_normalization(normalization: str, expected: str) -> None:
    config = CleaningConfig.model_validate({"normalization": normalization})
    assert clean("e\u0301 ﬁ ½ Ａ", config) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to jane.doe+news@mail.example.co.uk.", "Write to email@example.com."),
        ("<a_b%c@x-y.org>, J@Z.IO;", "<email@example.com>, email@example.com;"),
        ("mailto:me@host.dev?subject=x", "mailto:email@example.com?subject=x"),
        ("...me@host.dev", "...email@example.com"),
        ("a@b, @handle, user@localhost, 5 @ 3.50, a@b.c", "a@b, @handle, user@localhost, 5 @ 3.50, a@b.c"),
        ("at 8.8.8.8, (1.1.1.1:53) or 9.9.9.9/32.", "at 192.0.2.1, (192.0.2.1:53) or 192.0.2.1/32."),
        ("version 1.2.3.4.5, v8.8.8.8, 8.8.8.8.x, 8.8.8.8a", "version 1.2.3.4.5, v8.8.8.8, 8.8.8.8.x, 8.8.8.8a"),
        ("999.8.8.8, 08.8.8.8, 8.8.8, 1,234.5", "999.8.8.8, 08.8.8.8, 8.8.8, 1,234.5"),
        # Private, loopback, link-local, documentation, multicast, unspecified, broadcast: RFC 6890 and RFC 5771.
        *[(address, address) for address in ("10.0.0.1", "172.16.5.4", "192.168.1.1", "127.0.0.1", "169.254.1.1")],
        *[(address, address) for address in ("192.0.2.1", "203.0.113.7", "224.0.0.1", "0.0.0.0", "255.255.255.255")],
        ("2001:4860:4860::8888", "2001:db8::1"),
        ("[2606:4700:4700::1111]:443, 2a00:1450:4001:81b:0:0:0:200e:", "[2001:db8::1]:443, 2001:db8::1:"),
        *[(address, address) for address in ("::1", "fe80::1", "fd12:3456::1", "2001:db8::8a2e", "ff02::1")],
        (
            "12:30:45, 2024:10, std::abs, dead::beef, 2001:a, Luke 2001:3",
            "12:30:45, 2024:10, std::abs, dead::beef, 2001:a, Luke 2001:3",
        ),
    ],
)
def test_redaction(text: str, expected: str) -> None:
    assert clean(text, REDACT) == expected
    assert clean(text, DEFAULT) == text


def test_redaction_is_of_what_is_asked() -> None:
    text = "me@host.dev 8.8.8.8"
    assert clean(text, CleaningConfig(redact=("email",))) == "email@example.com 8.8.8.8"
    assert clean(text, CleaningConfig(redact=("ip",))) == "me@host.dev 192.0.2.1"


ADDRESSES = st.text("a1é2.:@-_ \u0301", max_size=40)
# The last are cases in which one step makes work for another.
ANY_INPUT = st.one_of(ANY_TEXT, WRONG_CHARACTERS, ADDRESSES, st.text("Ã\x00©\x85 \n\r\x80À\u0303A", max_size=12))


@settings(max_examples=500, deadline=None)
@given(ANY_INPUT, st.booleans(), st.sampled_from(["none", "NFC", "NFKC"]), st.sampled_from([(), ("email", "ip")]))
def test_clean_text_is_clean(text: str, repair: bool, normalization: str, redact: tuple[str, ...]) -> None:
    config = CleaningConfig.model_validate({"repair": repair, "normalization": normalization, "redact": redact})
    cleaned = clean(text, config)
    assert clean(cleaned, config) == cleaned
    assert "\n\n\n" not in cleaned
    assert all(char in "\n\t" or not (ord(char) < 32 or 127 <= ord(char) < 160) for char in cleaned)
    cleaned.encode()  # no lone surrogate is left


@pytest.mark.parametrize(
    "text",
    [
        " " * 2_000_000 + "x",
        "\r" * 2_000_000 + "x",
        "x" + "\n \t" * 700_000 + "x",
        "a" * 2_000_000 + "@",
        "a." * 1_000_000 + "@" + "a." * 1_000_000,
        "@" * 2_000_000,
        "1." * 1_000_000,
        "2001:" * 400_000,
        "Ã" * 200_000,
    ],
)
def test_cleaning_is_linear(text: str) -> None:
    started = time.process_time()
    clean(text, REDACT)
    assert time.process_time() - started < 10  # quadratic would take hours


# --- C4: Raffel et al. 2020, section 2.2 --------------------------------------------------------------------------

KEPT = "This line has five words."


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (KEPT, True),
        ("This line has four.", False),  # "at least 5 words"
        ("This line has no end mark", False),
        ("This line asks for an answer?", True),
        ("This line is much too loud!", True),
        ('This line quotes "five words"', True),
        ("This line quotes ‘all five words’", True),
        ("This line ends with a bracket)", False),
        ("This line is cut off before...", False),
        ("This line is cut off before…", False),
        ("Please enable JavaScript in your browser.", False),
        ("Read our Terms of Use before you go on.", False),
        ("This site uses cookies for its users.", False),
        ("Grandmother used cookies as her best argument.", True),
        ("我们明天再来。", True),  # each character of a script without spaces is a word
        ("你好吗。", False),
    ],
)
def test_c4_keeps_lines(line: str, kept: bool) -> None:
    text = f"{KEPT}\n{line}\n{KEPT}"
    assert remove_c4_lines(text, C4Config()) == (text if kept else f"{KEPT}\n{KEPT}")


def test_c4_removes_citations() -> None:
    text = "It was built[1] in 1820[citation needed] by hand[] there.[12][edit]"
    assert remove_c4_lines(text, C4Config()) == "It was built in 1820 by hand there."


def test_c4_keeps_paragraphs_apart() -> None:
    text = f"menu\n\n{KEPT}\n\nmenu\n\n{KEPT}\n{KEPT}\n\nmenu"
    assert remove_c4_lines(text, C4Config()) == f"{KEPT}\n\n{KEPT}\n{KEPT}"


def test_c4_lines_are_as_configured() -> None:
    text = "one\nThis line has no end mark\nThis page needs your JavaScript."
    config = C4Config(min_words_per_line=1, terminal_punctuation=False, remove_notices=False)
    assert remove_c4_lines(text, config) == text
    assert remove_c4_lines(text, config.model_copy(update={"min_words_per_line": 2})) == text.removeprefix("one\n")
    assert remove_c4_lines(text, config.model_copy(update={"remove_notices": True})) == text.rpartition("\n")[0]


@settings(deadline=None)
@given(ANY_TEXT)
def test_c4_takes_any_clean_text(text: str) -> None:
    cleaned = clean(text, DEFAULT)
    rest = remove_c4_lines(cleaned, C4Config())
    assert clean(rest, AS_IS) == rest
