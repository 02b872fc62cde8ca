"""What the processes of a pool share: imported, loaded and used once by the process that they are forked from."""

import pyarrow as pa

from model.data.cleaning import clean
from model.data.config import DataConfig
from model.data.language import identify_languages
from model.data.minhash import band_keys
from model.data.preparation import prepare_documents  # noqa: F401 - all that pieces are made of
from model.data.scores import score_documents
from model.data.words import split_words, word_hashes
from tasks.pool import forgo_pandas

pa.set_cpu_count(1)
pa.set_memory_pool(pa.system_memory_pool())  # gives back what it does not use
forgo_pandas()
_CONFIG = DataConfig()
_TEXTS = [clean("A few words, to have everything at hand that a document's first look needs.", _CONFIG.cleaning)]
_WORDS = split_words(_TEXTS)
score_documents(_TEXTS, _WORDS)
identify_languages(_TEXTS)
band_keys(*word_hashes(_WORDS), _CONFIG.deduplication)
