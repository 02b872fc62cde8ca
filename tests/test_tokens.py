"""The tokens stage: what stays is not encoded again; what training reads of it, locally and in S3."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from prefect.logging import disable_run_logger
from sample_text import make_documents
from token_runs import Corpus, corpus, make_config, prepare_tokens
from trained_tokenizer import train_tokenizer

from infra.storage import open_storage
from infra.storage_s3 import S3Storage
from model.data.config import TokenizerConfig
from model.data.tokenization.tokenizer import END_OF_TEXT, Tokenizer
from model.data.tokens.batches import TokenDataset
from model.data.tokens.shards import TokenShard
from tasks.config import PipelineConfig
from tasks.dataset import open_dataset, planned_epochs, training_order
from tasks.manifest import Manifest, read_manifest
from tasks.stage import Stage
from tasks.stages import tokens_stage, training_stage

Prepare = Callable[..., Manifest]

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TokenizerConfig(vocab_size=500)
    return train_tokenizer(make_documents(40), config, 0, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def prepare(tmp_path: Path, model_path: Path) -> Prepare:
    """Runs the stage on a corpus."""

    def prepare(config: PipelineConfig, texts: Corpus, tokenizer: Path = model_path) -> Manifest:
        return prepare_tokens(config, texts, tokenizer, tmp_path / "prepared")

    return prepare


def contents(run: Path) -> dict[str, bytes]:
    folder = run / "tokens"
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def modified(run: Path) -> dict[str, int]:
    return {path.relative_to(run).as_posix(): path.stat().st_mtime_ns for path in run.rglob("*.tokens")}


def test_a_shard_for_every_file_of_documents(tmp_path: Path, model_path: Path, prepare: Prepare) -> None:
    texts = corpus("web", "books")
    manifest = prepare(make_config(tmp_path / "run", "web", "books"), texts)
    tokenizer = Tokenizer(model_path)
    ids = {
        name: [token for text in part for token in (*tokenizer.encode(text), END_OF_TEXT)]
        for name, part in texts.items()
    }
    for name, expected in ids.items():
        assert TokenShard(tmp_path / f"run/tokens/{name}.tokens").tokens.tolist() == expected
        assert manifest.counts["parts"][name]["tokens"] == len(expected)
    train = ids["train/web-00000"] + ids["train/books-00000"]
    size = sum(len(text.encode()) for name, part in texts.items() if name.startswith("train/") for text in part)
    assert manifest.counts["splits"]["train"] == {"documents": 24, "tokens": len(train), "bytes": size, "shards": 2}
    unigram = np.load(tmp_path / "run/tokens/train/unigram.npy")
    assert unigram.tolist() == np.bincount(train, minlength=500).tolist()
    assert set(contents(tmp_path / "run")) == {
        *(f"{name}{suffix}" for name in texts for suffix in (".tokens", ".index")),
        *(f"{split}/unigram.npy" for split in ("train", "validation", "test")),
    }
    assert not list((tmp_path / "run").glob(".*"))  # no work is left behind


def test_shards_are_one_dataset_with_their_documents(tmp_path: Path, model_path: Path, prepare: Prepare) -> None:
    """Case B3: of 2 documents, of 3 and of none, none of them written anew."""
    documents = make_documents(5)
    texts = corpus("web") | {
        "train/web-00000": documents[:2],
        "train/web-00001": documents[2:],
        "train/web-00002": [],
    }
    config = make_config(tmp_path / "run", "web")
    manifest = prepare(config, texts)
    shards = [TokenShard(tmp_path / f"run/tokens/{name}.tokens") for name in texts if name.startswith("train/")]
    assert [len(shard) for shard in shards] == [2, 3, 0]
    tokenizer = Tokenizer(model_path)
    expected = [[*tokenizer.encode(text), END_OF_TEXT] for text in documents]
    assert [shard.document(n).tolist() for shard in shards for n in range(len(shard))] == expected
    stream = [token for document in expected for token in document]
    read = sequences(open_dataset(config, manifest, "train"))
    assert read == [stream[start : start + 33] for start in range(0, len(stream) - 32, 32)]
    assert manifest.counts["splits"]["train"]["documents"] == 5


def test_what_stays_is_not_encoded_again(tmp_path: Path, prepare: Prepare) -> None:
    run = tmp_path / "run"
    prepare(make_config(run, "web", "books"), corpus("web", "books"))
    before = modified(run)
    texts = corpus("books", "web", "code")
    texts["train/books-00000"][3] += " Changed."
    manifest = prepare(make_config(run, "web", "books", "code"), texts)
    after = modified(run)
    same = {name for name in before if after.get(name) == before[name]}
    assert same == {name for name in before if name != "tokens/train/books-00000.tokens"}
    assert manifest.summary.endswith("; 5 of 9 shards were there")
    fresh = prepare(make_config(tmp_path / "fresh", "web", "books", "code"), texts)
    assert contents(run) == contents(tmp_path / "fresh")
    assert (manifest.fingerprint, manifest.counts) == (fresh.fingerprint, fresh.counts)
    # A source that goes takes its shards with it.
    prepare(make_config(run, "web"), corpus("web"))
    assert {path.name for path in (run / "tokens/train").iterdir()} == {
        "web-00000.tokens",
        "web-00000.index",
        "unigram.npy",
    }


def test_another_tokenizer_encodes_everything(tmp_path: Path, prepare: Prepare) -> None:
    run = tmp_path / "run"
    prepare(make_config(run, "web"), corpus("web"))
    before = contents(run)
    config = TokenizerConfig(vocab_size=400)
    other = train_tokenizer(make_documents(40, seed=9), config, 0, tmp_path / "other")
    manifest = prepare(make_config(run, "web"), corpus("web"), other)
    assert "were there" not in manifest.summary
    assert manifest.counts["vocab_size"] == 400
    assert all(data != before[name] for name, data in contents(run).items() if name.endswith((".tokens", ".npy")))


def test_a_damaged_shard_is_encoded_again_and_no_other(tmp_path: Path, prepare: Prepare) -> None:
    run = tmp_path / "run"
    prepare(make_config(run, "web", "books"), corpus("web", "books"))
    whole = contents(run)
    path = run / "tokens/train/web-00000.tokens"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    (run / "tokens/test/web-00000.index").unlink()
    manifest = prepare(make_config(run, "web", "books"), corpus("web", "books"))
    assert contents(run) == whole
    assert manifest.summary.endswith("; 4 of 6 shards were there")


def test_killed_while_it_stores_it_still_knows_what_was_there(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    prepare(make_config(run, "web"), corpus("web"))
    before = modified(run)
    config, texts = make_config(run, "web", "books"), corpus("web", "books")
    with monkeypatch.context() as patch:
        patch.setattr(Stage, "complete", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(config, texts)
    assert read_manifest(str(run), "tokens").key == ""
    manifest = prepare(config, texts)
    assert manifest.summary.endswith("; 3 of 6 shards were there")
    assert {name: time for name, time in modified(run).items() if name in before} == before
    fresh = prepare(make_config(tmp_path / "fresh", "web", "books"), texts)
    assert contents(run) == contents(tmp_path / "fresh")
    assert manifest.fingerprint == fresh.fingerprint


@pytest.mark.parametrize("uri", ["run", "s3://anywhere/run"])
def test_no_work_is_left_once_a_stage_is_done(tmp_path: Path, uri: str) -> None:
    """Whatever was killed before: this very work, the same of another configuration, or what it was about to store."""
    uri = uri if uri.startswith("s3:") else str(tmp_path / uri)
    stages = [Stage(uri, "tokens", "tokens", {"encoding": number}, {}) for number in (1, 2)]
    for stage in (*stages, Stage(uri, "tokenizer", "tokenizer", {}, {})):
        with suppress(KeyboardInterrupt), stage.workspace() as work, stage.scratch() as scratch:
            (work / "piece").mkdir()
            (scratch / "shard").touch()
            raise KeyboardInterrupt
    assert not scratch.exists()
    scratch.mkdir(parents=True)  # as after SIGKILL
    assert [path.name.rpartition("-")[0] for path in work.parent.iterdir()].count("tokens") == 1
    with stages[1].workspace() as again:
        assert (again / "piece").exists()  # what was finished is not done again
    manifest = Manifest.model_construct(summary="", finished="")
    with disable_run_logger():
        stages[0].cached(manifest)
        assert work.exists()  # of another stage
        Stage(uri, "tokenizer", "tokenizer", {"vocab_size": 300}, {}).cached(manifest)
    assert not work.parent.exists()
    assert not scratch.parent.exists()


def test_work_of_another_configuration_goes_when_the_stage_turns_out_to_be_done(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config, texts = make_config(run, "web"), corpus("web")
    prepare(config, texts)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.tokens._check", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(make_config(run, "web", "books"), corpus("web", "books"))
    assert list((run / ".work").glob("tokens-*"))
    stored = contents(run)
    prepare(config, texts)
    assert contents(run) == stored
    assert not (run / ".work").exists()


def test_too_many_epochs_are_said_and_refused_in_training(
    tmp_path: Path, prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    config = make_config(run, "web", "books", training={"steps": 1000, "global_batch_size": 16})
    manifest = prepare(config, corpus("web", "books"))
    message = r"training\.steps \(1000\) would read the training text [\d.]+ times, more"
    assert any(re.match(message, record.getMessage()) for record in caplog.records)
    with pytest.raises(ValueError, match=message):
        planned_epochs(config, manifest.counts)
    weighted = make_config(run, "web", "books", weights=(30, 1), training={"steps": 150})
    with pytest.raises(
        ValueError,
        match=r"training\.steps \(150\) would read source 'web' [\d.]+ times, more than tokens\.max_epochs \(4\): "
        r"lower training\.steps, lower its weight, add text, or allow more epochs",
    ):
        planned_epochs(weighted, manifest.counts)
    for name, times in planned_epochs(
        make_config(run, "web", "books", weights=(2, 1), training={"steps": 10}), manifest.counts
    ).items():
        tokens = manifest.counts["parts"][f"train/{name}-00000"]["tokens"]
        share = {"web": 2 / 3, "books": 1 / 3}[name]
        assert times == pytest.approx(10 * 16 * share / ((tokens - 1) // 32), abs=1 / 32)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"train/web-00000": []}, r"model\.seq_len \(32\) must be less than the train split's tokens \(0\)"),
        (
            {"train/books-00000": ["x"]},
            r"model\.seq_len \(32\) must be less than the train split's tokens of source 'books' \(2\)",
        ),
        ({"validation/web-00000": []}, r"model\.seq_len \(32\) must be less than the validation split's tokens \(0\)"),
    ],
)
def test_too_few_tokens_are_refused(tmp_path: Path, prepare: Prepare, texts: Corpus, message: str) -> None:
    names = ("web", "books") if "train/books-00000" in texts else ("web",)
    weights = (1.0, 1.0) if len(names) == 2 else ()
    with pytest.raises(ValueError, match=message):
        prepare(make_config(tmp_path / "run", *names, weights=weights), corpus(*names) | texts)


def sequences(dataset: TokenDataset) -> list[list[int]]:
    return [dataset.sequence(number).tolist() for number in range(len(dataset))]


@pytest.mark.parametrize("weights", [(), (3.0, 1.0)])
def test_training_reads_the_same_from_s3(
    tmp_path: Path, s3_bucket: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch, weights: tuple[float, ...]
) -> None:
    local, remote = (
        make_config(uri, "web", "books", weights=weights) for uri in (tmp_path / "run", f"{s3_bucket}/a+b ✓/run")
    )
    texts = corpus("web", "books")
    here, there = prepare(local, texts), prepare(remote, texts)
    assert (here.fingerprint, here.counts) == (there.fingerprint, there.counts)
    monkeypatch.setattr(S3Storage, "local", lambda *_: pytest.fail("a shard was fetched whole"))
    for split in ("train", "validation"):
        expected = sequences(open_dataset(local, here, split))
        assert sequences(open_dataset(remote, there, split)) == expected
    order = training_order(local, here.counts)
    assert order.sequence_ids(0, 50).tolist() == training_order(remote, there.counts).sequence_ids(0, 50).tolist()
    assert len(open_dataset(local, here, "train").lengths) == (2 if weights else 1)


def test_an_error_of_s3_names_the_shard(tmp_path: Path, s3_bucket: str, prepare: Prepare) -> None:
    config = make_config(f"{s3_bucket}/run", "web")
    manifest = prepare(config, corpus("web"))
    dataset = open_dataset(config, manifest, "train")
    open_storage(config.run_uri).delete("tokens/train/web-00000.tokens")
    with pytest.raises(FileNotFoundError, match=r"/run/tokens/train/web-00000\.tokens does not exist$"):
        dataset.batch(np.array([0]))
    open_storage(config.run_uri).write("tokens/train/web-00000.tokens", b"JUMBOTOK")
    with pytest.raises(OSError, match=r"/run/tokens/train/web-00000\.tokens ends after 8 bytes; 32 expected$"):
        open_dataset(config, read_manifest(config.run_uri, "tokens"), "train")


def test_validation_and_training_share_no_token(tmp_path: Path, prepare: Prepare) -> None:  # case B5
    """Each split has shards of its own; what a document is in is decided where documents are prepared."""
    config = make_config(tmp_path / "run", "web")
    texts = {name: [f"{name} document {i} " * 30 for i in range(12)] for name in corpus("web")}
    manifest = prepare(config, texts)
    tokenizer = Tokenizer(tmp_path / "run/tokenizer/tokenizer.model")
    for split, other in (("train", "validation"), ("validation", "train")):
        dataset = open_dataset(config, manifest, split)
        text = "".join(tokenizer.decode(sequence) for sequence in sequences(dataset))
        assert f"{split}/web-00000 document" in text
        assert f"{other}/web-00000 document" not in text


def test_weights_are_part_of_training_and_of_nothing_before(tmp_path: Path, prepare: Prepare) -> None:
    plain, weighted, other = (
        make_config(tmp_path / "run", "web", "books", weights=weights) for weights in ((), (1.0, 1.0), (1.0, 2.0))
    )
    tokens = prepare(plain, corpus("web", "books"))
    assert len({training_stage(config, tokens).key for config in (plain, weighted, other)}) == 3
    assert len({tokens_stage(config, tokens, tokens).key for config in (plain, weighted, other)}) == 1
