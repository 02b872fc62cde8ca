"""Whether bytes that are no UTF-8 are letters and marks of Windows-1252 that stand where writers put them."""

import re
from dataclasses import dataclass
from itertools import islice

# Bytes that are no UTF-8, as the error handler "surrogateescape" gives them.
_FAULTS = re.compile("[\udc80-\udcff]+")
# Five bytes are nothing in Windows-1252; þ and ÿ are rare, and what filled flash memory and marks of UTF-16 look like.
_NO_EVIDENCE = b"\x81\x8d\x8f\x90\x9d\xfe\xff"
_CHARACTERS = {
    0xDC00 + byte: "\ufffd" if byte in _NO_EVIDENCE else bytes((byte,)).decode("cp1252") for byte in range(0x80, 0x100)
}
# Of the marks, those that may stand between two letters, and those that never follow one.
_JOINING = "‘’–—…·\xa0\xad"
_OPENING = "‚„¡¿"
_MODIFIERS = "ˆªº"  # letters to Unicode, marks to writers

_LETTER = re.compile("[A-Za-z]")
_LETTER_OR_DIGIT = re.compile("[A-Za-z0-9]")

_JUDGED_RUNS = 1000
_MAX_RUN = 3  # of accented letters, in hardly any language of Western Europe more


@dataclass(frozen=True)
class Faults:
    """The bytes of a text that are no UTF-8; all but their count is of the first thousand runs of them.

    Attributes:
        count: How many there are.
        kinds: How many different ones there are.
        in_place: How many stand where their character in Windows-1252 does.
        out_of_place: How many do not, without those that are no evidence of anything.
    """

    count: int
    kinds: int
    in_place: int
    out_of_place: int


def judge_faults(text: str) -> Faults:
    """Returns what is known of the lone surrogates U+DC80..U+DCFF in text that decoding with surrogateescape gave."""
    kinds: set[str] = set()
    in_place = out_of_place = 0
    for match in islice(_FAULTS.finditer(text), _JUDGED_RUNS):
        kinds.update(match[0])
        run = match[0].translate(_CHARACTERS)
        before, after = text[max(0, match.start() - 2) : match.start()], text[match.end() : match.end() + 2]
        for place, character in enumerate(run):
            if character == "\ufffd":
                continue
            if len(run) <= _MAX_RUN and _is_in_place(before, run, after, place):
                in_place += 1
            else:
                out_of_place += 1
    return Faults(len(text) - len(_FAULTS.sub("", text)), len(kinds), in_place, out_of_place)


def _is_in_place(before: str, run: str, after: str, place: int) -> bool:
    """Returns whether a writer would put a character of the run there: a letter in a word or as one, a mark beside one.

    Args:
        before: The two characters before the run.
        run: Characters that are not ASCII.
        after: The two characters after the run.
        place: That of the character in the run.
    """
    character = run[place]
    previous, following = (before + run[:place])[-1:], (run[place + 1 :] + after)[:1]
    if character.isalpha() and character not in _MODIFIERS:
        if character.isupper() and previous.islower():
            return False
        around = before[-1:] + after[:1]
        is_a_word = len(run) == 1 and not _LETTER_OR_DIGIT.search(around)
        return _LETTER.search(before + after if is_a_word else around) is not None
    if previous.isalpha() and following.isalpha():
        return character in _JOINING
    if previous.isalnum() and character in _OPENING:
        return False
    return _LETTER_OR_DIGIT.search(before + after) is not None
