"""MosaicML streaming on the work of loader.py; runs in its own environment.

python streaming_driver.py write TOKENS SEQ_LEN OUT     windows of a file of uint32 tokens as MDS shards
python streaming_driver.py read OUT BATCH_SIZE          one shuffled epoch; prints tokens per second
"""

import sys
import time
from itertools import islice
from unittest.mock import MagicMock

# Parts that this work does not use, and that would need torchvision and transformers.
for _name in (
    "streaming.multimodal",
    "streaming.text",
    "streaming.vision",
    "transformers",
    "transformers.feature_extraction_utils",
    "transformers.tokenization_utils_base",
):
    sys.modules[_name] = MagicMock()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from streaming import MDSWriter, StreamingDataset  # noqa: E402


def write(tokens_path: str, seq_len: int, out: str) -> None:
    tokens = np.memmap(tokens_path, np.uint32, mode="r")
    with MDSWriter(out=out, columns={"tokens": f"ndarray:uint32:{seq_len + 1}"}, size_limit=1 << 26) as writer:
        for start in range(0, len(tokens) - seq_len, seq_len):
            writer.write({"tokens": np.asarray(tokens[start : start + seq_len + 1])})


def read(folder: str, batch_size: int) -> None:
    """Batches are int64 tensors (B, T + 1), as the others' are."""
    dataset = StreamingDataset(local=folder, shuffle=True, shuffle_seed=1, batch_size=batch_size, num_canonical_nodes=1)
    sequences = iter(dataset)
    next(sequences)  # its shared memory and threads are made
    count, seconds = 0, time.perf_counter()
    while batch := [sample["tokens"] for sample in islice(sequences, batch_size)]:
        count += torch.from_numpy(np.stack(batch).astype(np.int64)).numel()
    print(count / (time.perf_counter() - seconds))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        read(sys.argv[2], int(sys.argv[3]))
