"""Jumbo on the work of documents.py: Gopher's filters, then exact and near deduplication, on 2 processes.

python prepare.py CORPUS OUT. CORPUS is a folder of JSONL files with text. OUT/work/read holds the documents that the
filters left, OUT/documents those that are no duplicate; origin in both is FILE#LINE.
"""

import sys
from functools import partial
from pathlib import Path

from model.data.config import DataConfig, FilterConfig, SourceConfig
from model.data.preparation import prepare_documents
from model.data.readers.documents import SourceFile
from tasks.pool import ProcessPool

PROCESSES = 2
MEMORY_BYTES = 64 << 20


def run(corpus: Path, out: Path) -> None:
    source = SourceConfig(uri=str(corpus))
    # Besides Gopher's rules nothing drops a document; a shard is a file of the corpus.
    config = DataConfig(sources=(source,), filters=FilterConfig(min_chars=1), shard_bytes=4 << 20)
    files = [
        SourceFile(source, "corpus", path.name, partial(open, path, "rb"), path.stat().st_size)
        for path in sorted(corpus.iterdir())
    ]
    pool = ProcessPool(PROCESSES, lambda _: None)
    prepare_documents(files, config, (), out / "work", out / "documents", pool, MEMORY_BYTES)
    pool.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
