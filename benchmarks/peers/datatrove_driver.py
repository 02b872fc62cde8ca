"""datatrove on the work of documents.py: Gopher's filters, then MinHash deduplication, on 2 local workers.

Runs in datatrove's own environment: python datatrove_driver.py CORPUS OUT. CORPUS is a folder of JSONL, id and text.
OUT/filtered holds the documents that the filters left, OUT/documents those that are no near duplicate.
Signatures are made in the pass that filters: one reading less than in datatrove's own example, in its favour. Exact
duplicates have equal signatures, so that no step of their own is needed.
"""

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

WORKERS = 2


def run(corpus: Path, out: Path) -> None:
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    signatures, buckets, removals = (str(out / name) for name in ("signatures", "buckets", "removals"))
    filtered = str(out / "filtered")
    stages: list[tuple[int, list[PipelineStep]]] = [
        (
            WORKERS,
            [
                JsonlReader(str(corpus)),
                GopherRepetitionFilter(),
                GopherQualityFilter(),
                JsonlWriter(filtered, compression=None),
                MinhashDedupSignature(signatures, config=config),
            ],
        ),
        (config.num_buckets, [MinhashDedupBuckets(signatures, buckets, config=config)]),
        (1, [MinhashDedupCluster(buckets, removals, config=config)]),
        (
            WORKERS,
            [
                JsonlReader(filtered),
                MinhashDedupFilter(removals),
                JsonlWriter(str(out / "documents"), compression=None),
            ],
        ),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=min(tasks, WORKERS), logging_dir=str(out / "logs" / str(number))
        ).run()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
