"""Removes exact and near duplicates over all documents, in pieces that survive a kill.

exact copies, by partitions of the content hash -> representatives, by shard -> candidate pairs, by band and partition
of its keys -> n-gram sets of the candidates, by shard -> verified pairs, by partition -> groups -> verdicts, by shard.
What survives depends on the documents alone: not on their order, nor on how they are spread over shards.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from model.data.config import DeduplicationConfig
from model.data.duplicates.addresses import (
    Partition,
    load,
    partitions,
    rows_of,
    save,
    shard_addresses,
    shard_slice,
    starts_of_groups,
)
from model.data.duplicates.candidates import BYTES_PER_DOCUMENT, find_pairs
from model.data.duplicates.components import choose_survivors, find_groups
from model.data.duplicates.minhash import lsh_shape
from model.data.duplicates.verification import PAIRS_AT_ONCE, verify, write_sets
from model.data.pieces import Engine, Piece

KEPT, EXACT_DUPLICATE, NEAR_DUPLICATE = range(3)
"""Why a document survives or does not, as reason.npy has it."""

_EXACT_BYTES_PER_DOCUMENT = 160
"""Peak memory of find_copies for each document in its partition."""

_Finish = Callable[[str, Mapping[str, Callable[[Path], None]]], list[Path]]
"""Has the pieces of a step made, functions by the pieces' names, and returns their folders."""


def deduplicate(
    folders: Sequence[Path], config: DeduplicationConfig, work: Path, engine: Engine, memory_bytes: int
) -> list[Path]:
    """Returns a folder for each read folder, with a row for each of its documents.

    survives.npy: bool. reason.npy: uint8, KEPT, EXACT_DUPLICATE or NEAR_DUPLICATE. survivor.npy: uint64, the address
    (shard << 32 | row) of the document that stays in its place. group.npy: (documents, 2) uint64, the content hash of
    the survivor of its group of near duplicates, its own where it is alone; if they are kept, all of a group share it.

    Args:
        folders: One a read shard, each with bands.npy (bands, documents) uint64 of minhash.band_keys, content.npy
            (documents, 2) uint64, the hash of the normalised text, raw.npy (documents,) uint64, the hash of the exact
            text and its source, size.npy (documents,), the text's bytes, and the column `text` of documents.parquet.
        config: What is near.
        work: Where the pieces are; a call that was killed goes on there, with the same arguments.
        engine: Makes the pieces.
        memory_bytes: Of one piece, so the engine's memory by its processes. The groups of near duplicates are found
            in one process, with components.BYTES_PER_DOCUMENT for each document that has one.
    """
    if not folders:
        return []
    finish = partial(_finish, engine, work)
    documents = sum(len(load(folder, "size")) for folder in folders)
    exact = finish(
        "exact duplicates",
        {
            part.name: partial(find_copies, folders=folders, partition=part)
            for part in partitions(documents, _EXACT_BYTES_PER_DOCUMENT, memory_bytes)
        },
    )
    representatives = finish(
        "representatives",
        {
            _name(shard): partial(write_representatives, folder=folder, copies=exact, shard=shard)
            for shard, folder in enumerate(folders)
        },
    )
    candidates = _candidates(
        folders, representatives, config, partitions(documents, BYTES_PER_DOCUMENT, memory_bytes), finish
    )
    groups = _groups(folders, candidates, config, finish)
    verdict = partial(write_verdicts, groups=groups, near_duplicates=config.near_duplicates)
    return finish(
        "verdicts",
        {
            _name(shard): partial(verdict, folder=folder, representatives=own, shard=shard)
            for shard, (folder, own) in enumerate(zip(folders, representatives, strict=True))
        },
    )


def find_copies(out: Path, folders: Sequence[Path], partition: Partition) -> None:
    """Writes the documents whose content hash others have too: addresses.npy ascending, and representative.npy.

    The representative is the one of the copies that would survive, so that the others need not be compared with it.
    """
    contents, addresses = [], []
    for shard, folder in enumerate(folders):
        content = load(folder, "content")
        (rows,) = np.nonzero(partition.holds(content[:, 0]))
        contents.append(content[rows])
        addresses.append(shard_addresses(shard, rows))
    content, address = np.concatenate(contents), np.concatenate(addresses)
    order = np.lexsort((content[:, 1], content[:, 0]))
    sizes = np.diff(starts_of_groups(content[order, 0], content[order, 1]))
    repeated = np.repeat(sizes > 1, sizes)
    groups = np.repeat(np.arange(len(sizes)), sizes)[repeated]
    copies = address[order][repeated]
    order = np.argsort(copies)
    copies = copies[order]
    save(out, addresses=copies, representative=choose_survivors(folders, copies, groups[order]))


def write_representatives(out: Path, folder: Path, copies: Sequence[Path], shard: int) -> None:
    """Writes representative.npy: the address of each of the shard's documents, or of the copy that stands for it."""
    representative = shard_addresses(shard, len(load(folder, "size")))
    for part in copies:
        addresses = load(part, "addresses")
        own = shard_slice(addresses, shard)
        representative[rows_of(addresses[own])] = load(part, "representative")[own]
    save(out, representative=representative)


def write_verdicts(
    out: Path,
    folder: Path,
    representatives: Path,
    groups: Path,
    shard: int,
    near_duplicates: Literal["remove", "keep"],
) -> None:
    """Writes survives, reason, survivor and group of a shard's documents, as deduplicate says."""
    representative = np.array(load(representatives, "representative"))
    addresses = load(groups, "addresses")
    places = np.searchsorted(addresses, representative)
    near = np.zeros(len(representative), np.bool)
    inside = places < len(addresses)
    near[inside] = addresses[places[inside]] == representative[inside]

    group = np.array(load(folder, "content"))
    group[near] = load(groups, "content")[places[near]]
    survivor = representative.copy()
    if near_duplicates == "remove":
        survivor[near] = load(groups, "survivor")[places[near]]
    reason = np.full(len(representative), KEPT, np.uint8)
    reason[survivor != representative] = NEAR_DUPLICATE
    reason[representative != shard_addresses(shard, len(representative))] = EXACT_DUPLICATE
    save(out, survives=reason == KEPT, reason=reason, survivor=survivor, group=group)


def _candidates(
    folders: Sequence[Path],
    representatives: Sequence[Path],
    config: DeduplicationConfig,
    parts: Sequence[Partition],
    finish: _Finish,
) -> list[Path]:
    bands, _ = lsh_shape(config.min_jaccard, config.num_hashes)
    find = partial(find_pairs, folders=folders, representatives=representatives)
    return finish(
        "candidates",
        {
            f"band-{band:04}-{part.name}": partial(find, band=band, partition=part)
            for band in range(bands)
            for part in parts
        },
    )


def _groups(folders: Sequence[Path], candidates: Sequence[Path], config: DeduplicationConfig, finish: _Finish) -> Path:
    write = partial(write_sets, candidates=candidates, ngram_words=config.ngram_words)
    sets = finish(
        "n-gram sets",
        {_name(shard): partial(write, folder=folder, shard=shard) for shard, folder in enumerate(folders)},
    )
    pairs = sum(len(load(folder, "pairs")) for folder in candidates)
    check = partial(verify, candidates=candidates, sets=sets, min_jaccard=config.min_jaccard)
    parts = partitions(pairs, 1, PAIRS_AT_ONCE)
    verified = finish("verified pairs", {part.name: partial(check, partition=part) for part in parts})
    (groups,) = finish("groups", {"all": partial(find_groups, folders=folders, verified=verified)})
    return groups


def _name(shard: int) -> str:
    return f"{shard:06}"


def _finish(engine: Engine, work: Path, what: str, functions: Mapping[str, Callable[[Path], None]]) -> list[Path]:
    pieces = [Piece(work / what.replace(" ", "-") / name, make) for name, make in functions.items()]
    engine.finish(what, pieces)
    return [piece.folder for piece in pieces]
