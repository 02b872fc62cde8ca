"""Groups of near duplicates: the connected components of the verified pairs, and the survivor of each."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.data.duplicates.addresses import Addresses, gather, load, save, starts_of_groups

BYTES_PER_DOCUMENT = 128
"""Peak memory of find_groups for each document that has a near duplicate."""


def find_groups(out: Path, folders: Sequence[Path], verified: Sequence[Path]) -> None:
    """Writes the documents that have a near duplicate: addresses.npy ascending, survivor.npy, content.npy of survivors.

    Memory grows with these documents alone: no more pairs than these are held at a time.
    """
    addresses = np.empty(0, np.uint64)
    pending: list[Addresses] = []
    for folder in verified:
        pending.append(np.unique(load(folder, "pairs")))
        if folder == verified[-1] or sum(map(len, pending)) > len(addresses):
            addresses = np.unique(np.concatenate([addresses, *pending]))
            pending = []
    groups = connected_components(_edges(verified, addresses), len(addresses))
    survivors = choose_survivors(folders, addresses, groups)
    save(out, addresses=addresses, survivor=survivors, content=gather(folders, "content", survivors))


def connected_components(parts: Iterable[NDArray[np.int64]], count: int) -> NDArray[np.int64]:
    """Returns the least number in each one's component, (count,).

    Args:
        parts: Edges, (edges, 2) of numbers below count.
        count: Of the nodes.

    Source: Liu, Tarjan 2019, "Simple Concurrent Labeling Algorithms for Connected Components", arXiv:1812.06177: roots
    are connected with full shortcutting, in a number of rounds that grows with the logarithm of the count.
    """
    root = np.arange(count)
    for edges in parts:
        while len(edges):
            ends = root[edges]
            edges = edges[ends[:, 0] != ends[:, 1]]
            ends = root[edges]
            np.minimum.at(root, ends.max(axis=1, initial=0), ends.min(axis=1, initial=count))
            while not np.array_equal(shortcut := root[root], root):
                root = shortcut
    return root


def choose_survivors(folders: Sequence[Path], addresses: Addresses, groups: NDArray[np.int64]) -> Addresses:
    """Returns the survivor of each document's group: its longest text; of equal ones the least content hash, then raw.

    Documents that are equal in all of these are the same text of the same source: the choice among them is not seen.
    """
    sizes = gather(folders, "size", addresses).astype(np.int64)
    content = gather(folders, "content", addresses)
    raw = gather(folders, "raw", addresses)
    order = np.lexsort((addresses, raw, content[:, 1], content[:, 0], -sizes, groups))
    starts = starts_of_groups(groups[order])
    survivors = np.empty_like(addresses)
    survivors[order] = np.repeat(addresses[order[starts[:-1]]], np.diff(starts))
    return survivors


def _edges(verified: Sequence[Path], addresses: Addresses) -> Iterator[NDArray[np.int64]]:
    """The pairs as places among the addresses, about as many at once: each part costs work on all nodes."""
    pending: list[NDArray[np.int64]] = []
    for folder in verified:
        pending.append(np.searchsorted(addresses, load(folder, "pairs")))
        if folder == verified[-1] or sum(map(len, pending)) > len(addresses):
            yield np.concatenate(pending)
            pending = []
