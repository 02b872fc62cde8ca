"""Cleans a document's text and names the first quality rule that it breaks."""

import re
from collections.abc import Iterator

from model.config import FilterConfig
from model.data.documents import replace_surrogates

# Unicode 5.8 (newline guidelines): all of these end a line, so words around them must not be joined.
_LINE_END = re.compile("\r\n|[\r\v\f\x85]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_BLANK_LINES = re.compile("\n{3,}")

_LETTER = re.compile(r"[^\W\d_]")
# Scripts written without spaces: Thai, Lao, Myanmar, Khmer, kana, Bopomofo, Han with its punctuation, full-width forms.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\u2e80-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff00-\uff9f\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)


def clean(text: str) -> str:
    """Returns text with `\\n` line ends, no control characters but `\\n` and `\\t`, no blanks at line ends, at most one
    empty line in a row, none at the ends, and U+FFFD for lone surrogates."""
    text = _CONTROL.sub("", _LINE_END.sub("\n", replace_surrogates(text)))
    # Line by line: a pattern for trailing blanks is quadratic in a long run of blanks.
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return _BLANK_LINES.sub("\n\n", text).strip()


def failed_rule(text: str, filters: FilterConfig) -> str | None:
    """Returns the name of the first rule (a field of FilterConfig) that text breaks, None when it meets all.

    Words are what white space separates. Scripts that write none count a character as a word, and have no word length.

    Source: the quality and repetition filters of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix A.1).
    """
    return next(_broken_rules(text, filters), None)


def _broken_rules(text: str, filters: FilterConfig) -> Iterator[str]:
    if len(text) < filters.min_chars:
        yield "min_chars"
    if len(text) > filters.max_chars:
        yield "max_chars"
    words = text.split()
    spaced = [word for word in words if word.isascii() or not _UNSPACED.search(word)]
    if spaced and sum(map(len, spaced)) < filters.min_mean_word_chars * len(spaced):
        yield "min_mean_word_chars"
    if spaced and sum(map(len, spaced)) > filters.max_mean_word_chars * len(spaced):
        yield "max_mean_word_chars"
    alphabetic = sum(1 for word in words if word.isalpha() or _LETTER.search(word))
    if alphabetic < filters.min_alphabetic_words * len(words):
        yield "min_alphabetic_words"
    n_words = len(spaced) + len(_UNSPACED.findall(text))
    symbols = max(text.count("#"), text.count("...") + text.count("…"))
    if symbols > filters.max_symbols_per_word * n_words:
        yield "max_symbols_per_word"
    # Blank lines separate paragraphs; they are no repetition.
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if len(lines) - len(set(lines)) > filters.max_duplicate_lines * len(lines):
        yield "max_duplicate_lines"
