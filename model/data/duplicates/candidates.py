"""Candidates for near duplicates: pairs of documents that share a MinHash band key."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.data.duplicates.addresses import (
    Addresses,
    Partition,
    gather,
    load,
    save,
    shard_addresses,
    starts_of_groups,
)

BYTES_PER_DOCUMENT = 360
"""Peak memory of find_pairs for each document in its partition, if all are in buckets of _ALL_PAIRS; mostly 40."""

_ALL_PAIRS = 16
"""Most documents with one key that are all compared with each other; more are compared with two others each."""


def find_pairs(
    out: Path, folders: Sequence[Path], representatives: Sequence[Path], band: int, partition: Partition
) -> None:
    """Writes the pairs that share a key of the band: pairs.npy (pairs, 2) by pair_hashes, and addresses.npy of all.

    What is compared within a bucket goes by the order of the content hashes, so that it does not depend on where the
    documents come from. A document that is an exact copy of another takes no part. Every piece reads all keys of its
    band: a nanosecond for each, far less than to sort them by partition first.
    """
    keys, addresses = _read_keys(folders, representatives, band, partition)
    order = np.argsort(keys)
    keys, addresses = keys[order], addresses[order]
    repeated = _repeated(keys)
    keys, addresses = keys[repeated], addresses[repeated]
    content = gather(folders, "content", addresses)
    order = np.lexsort((content[:, 1], content[:, 0], keys))
    pairs = bucket_pairs(addresses[order], starts_of_groups(keys[order]))
    pairs.sort(axis=1)
    order = np.argsort(pair_hashes(pairs), kind="stable")
    save(out, pairs=pairs[order], addresses=np.sort(addresses))


def pair_hashes(pairs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What spreads pairs (n, 2) evenly over partitions, (n,)."""
    hashes = (pairs[..., 0] * np.uint64(0x9E3779B97F4A7C15)) ^ pairs[..., 1]
    hashes = (hashes ^ hashes >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return hashes ^ hashes >> np.uint64(32)


def bucket_pairs(members: Addresses, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns which members to compare, (pairs, 2): never more than a few times as many as there are members.

    Args:
        members: The buckets' members, one bucket after the other.
        starts: Where each bucket starts, and the number of members, (buckets + 1,).
    """
    sizes = np.diff(starts)
    small = np.repeat(sizes <= _ALL_PAIRS, sizes)
    rank = np.arange(len(members)) - np.repeat(starts[:-1], sizes)
    pairs = np.empty((int(np.where(small, rank, np.minimum(rank, 2)).sum()), 2), np.uint64)
    filled = 0
    for distance in range(1, _ALL_PAIRS):
        (right,) = np.nonzero((rank >= distance) & (small | (distance == 1)))
        pairs[filled : filled + len(right)] = np.stack([members[right - distance], members[right]], axis=1)
        filled += len(right)
    (right,) = np.nonzero((rank >= 2) & ~small)
    pairs[filled:] = np.stack([members[right - rank[right]], members[right]], axis=1)
    return pairs


def _read_keys(
    folders: Sequence[Path], representatives: Sequence[Path], band: int, partition: Partition
) -> tuple[NDArray[np.uint64], Addresses]:
    keys, addresses = [], []
    for shard, (folder, marks) in enumerate(zip(folders, representatives, strict=True)):
        column, representative = load(folder, "bands")[band], load(marks, "representative")
        wanted = partition.holds(column) & (column != 0) & (representative == shard_addresses(shard, len(column)))
        (rows,) = np.nonzero(wanted)
        keys.append(column[rows])
        addresses.append(shard_addresses(shard, rows))
    return np.concatenate(keys), np.concatenate(addresses)


def _repeated(keys: NDArray[np.uint64]) -> NDArray[np.bool]:
    """Which of the sorted keys others have too."""
    sizes = np.diff(starts_of_groups(keys))
    return np.repeat(sizes > 1, sizes)
