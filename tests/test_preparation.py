"""From source files to the document shards and their funnel."""

import gzip
import io
import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from sample_text import make_documents

from model.config import DataConfig, SourceConfig
from model.data.documents import SourceFile
from model.data.preparation import SPLITS, Funnel, iter_documents, prepare_documents

SOURCE = SourceConfig(uri="made", name="made")
OTHER = SourceConfig(uri="other", name="other")


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def source_file(data: bytes, name: str = "a.jsonl", source: SourceConfig = SOURCE) -> SourceFile:
    return SourceFile(source, source.name, name, lambda: io.BytesIO(data))


def config(*sources: SourceConfig, **changes: object) -> DataConfig:
    fractions = {"validation_fraction": 0.2, "test_fraction": 0.2}
    return DataConfig.model_validate({"sources": sources or (SOURCE,), **fractions, **changes})


def prepare(out: Path, files: list[SourceFile], settings: DataConfig) -> Funnel:
    return prepare_documents(files, settings, out, lambda funnel: None)


def split_texts(out: Path, split: str) -> list[str]:
    return [document.text for document in iter_documents(sorted((out / split).glob("*.parquet")))]


def all_texts(out: Path) -> list[str]:
    return [text for split in SPLITS for text in split_texts(out, split)]


def test_funnel_counts_what_became_of_every_record(tmp_path: Path) -> None:
    texts = make_documents(60)
    extra = ["short", texts[0].upper().replace(" ", "  \r\n", 1), texts[3] + "\x00\n"]
    data = json_lines(texts + extra) + b'{"body": 1}\n{\n' + json_lines(["x" * 40_000])
    settings = config(max_document_bytes=20_000)
    calls: list[int] = []
    files = [source_file(data), source_file(texts[1].encode(), "b.txt"), source_file(json_lines(texts[:1]), "c.ndjson")]
    funnel = prepare_documents(files, settings, tmp_path, lambda funnel: calls.append(funnel.sources["made"].files))

    counts = funnel.sources["made"]
    assert counts.files == 3
    assert counts.read == 60 + 3 + 3 + 1 + 1
    assert counts.dropped == {
        "min_chars": 1, "duplicate": 4, "no_text_field": 1, "invalid_json": 1, "too_long": 1,
    }  # fmt: skip
    assert counts.kept == 60 == sum(split.documents for split in funnel.splits.values())
    assert counts.kept_bytes == sum(len(text) for text in texts) == sum(split.bytes for split in funnel.splits.values())
    assert counts.read_bytes == sum(map(len, [*texts, *extra, texts[1], texts[0]]))
    assert counts.damaged == []
    assert calls == [1, 2, 3]
    assert sorted(all_texts(tmp_path)) == sorted(texts)
    assert json.loads(json.dumps(funnel.to_dict()))["splits"]["train"]["documents"] == funnel.splits["train"].documents


def test_columns_and_compression(tmp_path: Path) -> None:
    prepare(tmp_path, [source_file(json_lines(make_documents(30)))], config())
    file = pq.ParquetFile(tmp_path / "train" / "part-00000.parquet")
    assert file.schema_arrow.names == ["text", "source", "document_id"]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    row = file.read().to_pylist()[0]
    assert row["source"] == "made"
    assert len(bytes.fromhex(row["document_id"])) == 16


def test_the_first_of_equal_documents_survives(tmp_path: Path) -> None:
    texts = make_documents(30)
    shouted = [text.upper() for text in texts]
    files = [source_file(json_lines(texts[:15])), source_file(json_lines(shouted + texts), source=OTHER)]
    funnel = prepare(tmp_path, files, config(SOURCE, OTHER))
    assert sorted(all_texts(tmp_path)) == sorted(texts[:15] + shouted[15:])
    assert funnel.sources["other"].dropped == {"duplicate": 45}


def test_splits_share_no_document_and_do_not_depend_on_order(tmp_path: Path) -> None:  # case B5
    texts = make_documents(400)
    prepare(tmp_path / "a", [source_file(json_lines(texts))], config())
    shuffled = random.Random(1).sample([*texts, *(text.lower() for text in texts)], k=800)
    prepare(tmp_path / "b", [source_file(json_lines(shuffled))], config())
    for split in SPLITS:
        first = {text.lower() for text in split_texts(tmp_path / "a", split)}
        assert first == {text.lower() for text in split_texts(tmp_path / "b", split)}
    sizes = {split: len(split_texts(tmp_path / "a", split)) for split in SPLITS}
    assert sum(sizes.values()) == len({text.lower() for text in all_texts(tmp_path / "a")}) == 400
    # Binomial: 80 +- 4 standard deviations of 8.
    assert 48 < sizes["validation"] < 112
    assert 48 < sizes["test"] < 112


def test_equal_input_gives_equal_bytes_and_replaces_what_stood_there(tmp_path: Path) -> None:
    files = [source_file(json_lines(make_documents(60)))]
    prepare(tmp_path / "a", files, config())
    stale = tmp_path / "b" / "train" / "part-00007.parquet"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of a run that was killed")
    prepare(tmp_path / "b", files, config())

    def contents(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_shards_are_bounded_and_in_order(tmp_path: Path) -> None:
    texts = make_documents(300)
    settings = config(shard_bytes=1 << 16)
    prepare(tmp_path, [source_file(json_lines(texts))], settings)
    shards = sorted((tmp_path / "train").iterdir())
    assert [shard.name for shard in shards] == [f"part-{i:05}.parquet" for i in range(len(shards))]
    assert len(shards) > 2
    assert all(sum(len(document.text) for document in iter_documents([shard])) <= 1 << 16 for shard in shards)
    train = split_texts(tmp_path, "train")
    assert train == [text for text in texts if text in set(train)]


def test_damaged_file_is_reported_and_its_whole_records_kept(tmp_path: Path) -> None:  # case D4
    texts = make_documents(60)
    files = [
        source_file(gzip.compress(json_lines(texts[:40]))[:-20], "cut.jsonl.gz"),
        source_file(json_lines(texts[40:])),
    ]
    funnel = prepare(tmp_path, files, config())
    (damage,) = funnel.sources["made"].damaged
    assert damage.startswith("cut.jsonl.gz: ")
    assert set(texts[:39] + texts[40:]) <= set(all_texts(tmp_path)) <= set(texts)


def test_a_wrong_checksum_loses_no_document(tmp_path: Path) -> None:
    texts = make_documents(60)
    data = bytearray(gzip.compress(json_lines(texts)))
    data[-8] ^= 1
    funnel = prepare(tmp_path, [source_file(bytes(data), "crc.jsonl.gz")], config())
    (damage,) = funnel.sources["made"].damaged
    assert damage.startswith("crc.jsonl.gz: ")
    assert sorted(all_texts(tmp_path)) == sorted(texts)


def test_files_of_other_encodings_and_line_ends_are_counted(tmp_path: Path) -> None:
    texts = make_documents(60)
    lines = json_lines(texts[:10])
    files = [
        source_file(json_lines(texts)),
        source_file(lines.replace(b"\n", b"\r"), "mac.jsonl"),
        source_file(lines.decode().encode("utf-16"), "windows.jsonl"),
    ]
    counts = prepare(tmp_path, files, config()).sources["made"]
    assert counts.dropped == {"invalid_json": 1, "not_utf8": 10}
    assert (counts.read, counts.kept) == (71, 60)


@pytest.mark.parametrize("sources", [(SOURCE, OTHER), (OTHER, SOURCE)])
def test_source_that_kept_nothing_is_named(tmp_path: Path, sources: tuple[SourceConfig, ...]) -> None:
    files = [source_file(json_lines(make_documents(60))), source_file(b'{"text": "hi"}\n{}\n', source=OTHER)]
    with pytest.raises(
        ValueError, match=r"'other' kept no document of 2 read \(dropped: min_chars 1, no_text_field 1\)"
    ):
        prepare(tmp_path, files, config(*sources))


def test_source_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.sources\[1\] \(other\) has no files"):
        prepare(tmp_path, [source_file(json_lines(make_documents(60)))], config(SOURCE, OTHER))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_empty_split_is_named(tmp_path: Path, split: str) -> None:
    settings = config(**{f"{split}_fraction": 1e-9})
    with pytest.raises(ValueError, match=f"the {split} split is empty: of 60 documents kept"):
        prepare(tmp_path, [source_file(json_lines(make_documents(60)))], settings)
