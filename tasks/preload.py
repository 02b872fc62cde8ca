"""What the processes of a pool share: imported, loaded and used once by the process that they are forked from."""

import gc
import os
import sys
from importlib.abc import MetaPathFinder

# Read when pyarrow is imported. The C library's allocator gives back what is not used, pyarrow's own keeps it.
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"

import pyarrow as pa

from model.data.config import DataConfig
from model.data.duplicates.minhash import band_keys
from model.data.filtering.cleaning import clean
from model.data.filtering.language import identify_languages
from model.data.filtering.scores import score_documents
from model.data.preparation import prepare_documents  # noqa: F401 - all that pieces are made of
from model.data.words import split_words, word_hashes


class _NoPandas(MetaPathFinder):
    """pyarrow would import it, 28 MB, to ask whether what it was given is pandas'; it asks for it once."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname, name=fullname)


def _look_at_a_document() -> None:
    config = DataConfig()
    texts = [clean("A few words, to have everything at hand that a document's first look needs.", config.cleaning)]
    words = split_words(texts)
    score_documents(texts, words)
    identify_languages(texts)
    band_keys(*word_hashes(words), config.deduplication)


pa.set_cpu_count(1)
_finder = _NoPandas()
sys.meta_path.insert(0, _finder)
_look_at_a_document()
sys.meta_path.remove(_finder)
gc.freeze()  # what collection does not look at stays shared
