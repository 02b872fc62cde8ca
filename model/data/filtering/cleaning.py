"""Repairs a document's text, and removes what is personal or not prose from it."""

import ipaddress
import re
import unicodedata

import ftfy

from model.data.config import C4Config, CleaningConfig
from model.data.filtering.scores import TERMINAL_PUNCTUATION
from model.data.readers.records import replace_surrogates
from model.data.words import UNSPACED

# Unicode 5.8 (newline guidelines): all of these end a line, so words around them must not be joined.
_LINE_END = re.compile("\r\n|[\r\v\f\x85]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_LINE_END_OR_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BLANK_LINES = re.compile("\n{3,}")

# What ftfy calls mojibake holds a match of this: one of a few characters, or two beside each other of those that wrong
# encodings give, Greek and Cyrillic letters but with another. Few lines do, and this is ten times faster to know. The
# first character of a pattern is found fast where it stands alone: hence the looks back from behind it, here and below.
_TELLTALES = "\x80-\x9fÂÃŒœ"
_LETTERS = "\u0386-\u0401\u0403-\u048f"
_OTHERS = "\x80-\u0385\u0402\u0490-\u04ff\u2000-\u25ff\uf8ff\ufb01\ufb02\ufffd"
_SUSPECT = re.compile(f"[{_OTHERS}{_LETTERS}](?:(?<=[{_TELLTALES}])|[{_OTHERS}]|(?<=[{_OTHERS}])[{_LETTERS}])")
# After a character of U+0080 to U+00FF, U+0085 is rather a byte of text in the wrong encoding.
_NEXT_LINE = re.compile("\x85(?<![\x80-\xff].)")
_FIX_ENCODING = ftfy.TextFixerConfig(explain=False)

# A local part has at most 64 characters (RFC 5321, 4.5.3.1.1), a label of a domain 63. A mark that follows would
# combine with the placeholder.
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9_%+-])[A-Za-z0-9_%+-][A-Za-z0-9._%+-]{0,63}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"
    r"(?![\u0300-\u036f])"
)
_IPV4 = re.compile(r"[0-9](?<![\w.].)[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?!\w|\.\w)")
# Public addresses are in 2000::/3 (RFC 4291, 2.4).
_IPV6 = re.compile(r"[23](?<![\w:.].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{0,33}(?:[0-9A-Fa-f]|::)(?!\w|[.:]\w)")
# Reserved for documentation: RFC 2606, RFC 5737 and RFC 3849.
_EMAIL_PLACEHOLDER = "email@example.com"
_IP_PLACEHOLDERS = {4: "192.0.2.1", 6: "2001:db8::1"}

_CITATION = re.compile(r"\[(?:[0-9]*|edit|citation needed)\]")
_NOTICE = re.compile(
    "javascript|terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies", re.IGNORECASE
)
_ELLIPSES = ("...", "…")


def clean(text: str, config: CleaningConfig) -> str:
    """Returns text with `\\n` line ends, no control characters but `\\n` and `\\t`, no blanks at line ends, at most one
    empty line in a row, none at the ends, U+FFFD for lone surrogates, and what config asks for. Clean text stays."""
    text = replace_surrogates(text)
    if not config.repair:
        return _tidy(text, config)
    # Until nothing changes: what is tidied away can have stood within mojibake. Every repair shortens the text.
    while (tidied := _tidy(repaired := _repair(text), config)) != repaired:
        text = tidied
    return tidied


def remove_c4_lines(text: str, config: C4Config) -> str:
    """Returns text without the lines that C4's rules remove, and without Wikipedia's citation marks.

    Lines that end with an ellipsis go with those without terminal punctuation. Blank lines between lines that are
    kept stay, since they separate paragraphs.

    Source: Raffel et al. 2020, JMLR 21(140), section 2.2; ellipses: c4_utils.py of TensorFlow Datasets.
    """
    lines = [line.rstrip() for line in _CITATION.sub("", text).split("\n")]
    return _BLANK_LINES.sub("\n\n", "\n".join(line for line in lines if not line or _keeps(line, config))).strip()


def _keeps(line: str, config: C4Config) -> bool:
    if config.terminal_punctuation and (line[-1] not in TERMINAL_PUNCTUATION or line.endswith(_ELLIPSES)):
        return False
    n_words = len((line if line.isascii() else UNSPACED.sub(r" \g<0> ", line)).split())
    return n_words >= config.min_words_per_line and not (config.remove_notices and _NOTICE.search(line))


def _repair(text: str) -> str:
    """Decodes what was decoded with the wrong encoding, line by line: one line's can differ from the next one's."""
    if text.isascii() or not _SUSPECT.search(text):
        return text
    return "\n".join(
        ftfy.fix_encoding(line, _FIX_ENCODING) if _SUSPECT.search(line) else line
        for line in _NEXT_LINE.sub("\n", text).split("\n")
    )


def _tidy(text: str, config: CleaningConfig) -> str:
    if _LINE_END_OR_CONTROL.search(text):
        text = _CONTROL.sub("", _LINE_END.sub("\n", text))
    if config.normalization != "none":
        text = unicodedata.normalize(config.normalization, text)
    if "email" in config.redact and "@" in text:
        text = _EMAIL.sub(_EMAIL_PLACEHOLDER, text)
    if "ip" in config.redact:
        text = _IPV6.sub(_redact_ip, _IPV4.sub(_redact_ip, text))
    # Line by line: a pattern for trailing blanks is quadratic in a long run of blanks.
    text = "\n".join(map(str.rstrip, text.split("\n")))
    return (_BLANK_LINES.sub("\n\n", text) if "\n\n\n" in text else text).strip()


def _redact_ip(match: re.Match[str]) -> str:
    """The placeholder for a public address; what is private, reserved or no address stays."""
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    return _IP_PLACEHOLDERS[address.version] if address.is_global and not address.is_multicast else match[0]
