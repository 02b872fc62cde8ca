"""The whole graph, in this process, on real ranks and a real Prefect server."""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_config, write_corpus

from flows.janitor import janitor
from flows.preparation import preparation
from flows.pretrain import pretrain
from flows.scoring import scoring
from infra.cluster import ClusterRequest
from infra.local import LocalProvider, default_state_dir
from tasks.cluster import cluster_name
from tasks.config import PipelineConfig
from tasks.run import open_run
from tasks.sources import find_sources

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: str, tmp_path_factory: pytest.TempPathFactory, prefect_server: str) -> PipelineConfig:
    """A run that went through."""
    config = tiny_config(tmp_path_factory.mktemp("runs") / "a run, finished ✓", corpus)
    result = pretrain(config)
    assert result.report_uri == f"{config.run_uri}/report.html"
    return config


@pytest.fixture(autouse=True)
def _no_cluster_is_left() -> Iterator[None]:
    yield
    assert LocalProvider(default_state_dir()).list_clusters() == []


def flow_run_states(name: str) -> tuple[Any, dict[str, str]]:
    """The newest flow run of this name, and the state of each of its task runs by task."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[name])), sort=FlowRunSort.START_TIME_DESC, limit=1
        )
        deadline = time.monotonic() + 30
        while True:  # task runs reach the server's database a moment after they ended
            tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
            if all(task.state and task.state.is_final() for task in tasks) or time.monotonic() > deadline:
                return run, {task.name.rsplit("-", 1)[0]: task.state.name for task in tasks if task.state}
            time.sleep(0.2)


def read(config: PipelineConfig, name: str) -> Any:
    return json.loads((Path(config.run_uri) / name).read_text(encoding="utf-8"))


def modified(config: PipelineConfig) -> dict[Path, int]:
    """When each file of a run was last written; all but what every flow run writes."""
    written = ("config.yaml", ".lock")
    files = [path for path in Path(config.run_uri).rglob("*") if path.is_file() and path.name not in written]
    return {path: path.stat().st_mtime_ns for path in files}


def test_the_run_directory_holds_every_stage(finished: PipelineConfig) -> None:
    run = Path(finished.run_uri)
    assert yaml.safe_load((run / "config.yaml").read_text()) == finished.model_dump(mode="json")
    for directory in ("documents", "tokenizer", "tokens", "scaling", "checkpoints", "evaluation", "."):
        manifest = read(finished, f"{directory}/manifest.json")
        assert manifest["format_version"] == 1
        for file in manifest["files"]:
            assert (run / directory / file["name"]).stat().st_size == file["size_bytes"]
    assert not (run / ".scratch").exists()
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_report_stands_beside_the_baselines(finished: PipelineConfig) -> None:
    report = read(finished, "evaluation/report.json")
    test = report["documents"]["test"]
    assert set(test["baselines"]) == {"untrained", "unigram", "xz"}
    assert all(0 < value < 20 for value in [test["bits_per_byte"], *test["baselines"].values()])
    # The untrained model knows nothing of its 500 pieces: log2(500) bits a token, within its small initial logits.
    per_token = test["baselines"]["untrained"] * test["bytes"] / test["tokens"]
    assert per_token == pytest.approx(math.log2(500), rel=0.05)
    assert test["bits_per_byte"] < test["baselines"]["untrained"]
    assert report["step"] == 12
    assert set(report["multiple_choice"]) == {"presidents"}
    assert report["samples"][0]["prompt"] == "The House"
    assert read(finished, "report.json")["evaluation"] == report


def test_every_step_has_one_line_of_metrics(finished: PipelineConfig) -> None:
    lines = [json.loads(line) for line in (Path(finished.run_uri) / "metrics/train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert {"step", "loss", "learning_rate", "tokens", "tokens_per_second"} <= set(line)
    assert [line["step"] for line in lines if "validation_loss" in line] == [6, 12]
    assert lines[-1]["tokens"] == sum(line["batch_size"] for line in lines) * 32
    assert lines[0]["batch_size"] == 2  # the ramp
    assert lines[-1]["batch_size"] == 8


def test_a_finished_run_is_cached_in_the_ui_and_needs_no_cluster(finished: PipelineConfig) -> None:
    """prefect 15658: a flow that is run again does not redo finished stages."""
    before = modified(finished)
    first = pretrain(finished)
    run, states = flow_run_states("pretrain")
    stages = ("preprocess", "tokenizer", "tokens", "validate-scaling", "train", "evaluate", "report")
    assert {stage: states[stage] for stage in stages} == dict.fromkeys(stages, "Cached")
    assert "provision" not in states
    assert run.state.name == "Completed"
    assert modified(finished) == before
    assert first.bits_per_byte == read(finished, "evaluation/report.json")["documents"]["test"]["bits_per_byte"]


def test_a_missing_or_cut_file_is_made_again(finished: PipelineConfig) -> None:
    name = "tokens/test/made-up-00000.tokens"
    path = Path(finished.run_uri) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    preparation(finished)
    assert path.read_bytes() == whole
    _, states = flow_run_states("preparation")
    assert (states["tokenizer"], states["tokens"]) == ("Cached", "Completed")


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("documents/test/made-up-00000.parquet", "preprocess"),
        ("tokenizer/tokenizer.model", "tokenizer"),
        ("tokens/train/made-up-00000.tokens", "tokens"),
    ],
)
def test_a_flipped_byte_is_found_and_mended(finished: PipelineConfig, name: str, stage: str) -> None:
    path = Path(finished.run_uri) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    preparation(finished)
    assert path.read_bytes() == whole
    _, states = flow_run_states("preparation")
    stages = ("preprocess", "tokenizer", "tokens")
    assert {s: states[s] for s in stages} == {s: "Completed" if s == stage else "Cached" for s in stages}


def test_a_damaged_last_checkpoint_is_trained_again(finished: PipelineConfig) -> None:
    run = Path(finished.run_uri)
    before = (run / "metrics/train.jsonl").read_text().splitlines()
    path = next((run / "checkpoints/step-00000012").glob("__0_*.distcp"))
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    result = pretrain(finished)
    after = (run / "metrics/train.jsonl").read_text().splitlines()
    assert after[:8] == before[:8]  # it went on from step 8
    losses = [[json.loads(line)["loss"] for line in lines] for lines in (before, after)]
    assert losses[0] == losses[1]
    assert result.bits_per_byte == read(finished, "evaluation/report.json")["documents"]["test"]["bits_per_byte"]


def test_two_flows_do_not_share_a_run_directory(finished: PipelineConfig) -> None:
    with (
        open_run(finished),
        pytest.raises(ValueError, match=rf"is in use by another flow \(pid {os.getpid()}\)"),
    ):
        preparation(finished)


def test_a_runs_own_files_are_no_source(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    config = tiny_config(tmp_path / "run", f"{tmp_path}/**/*.jsonl")
    (tmp_path / "run/metrics").mkdir(parents=True)
    (tmp_path / "run/metrics/train.jsonl").write_text('{"text": "not a document"}\n')
    (source,) = find_sources(config.data, config.run_uri)
    assert [entry.name for entry in source.entries] == [Path(corpus).name]


def test_any_checkpoint_can_be_scored(finished: PipelineConfig) -> None:
    manifest = scoring(finished, 8)
    assert manifest.counts["step"] == 8
    assert read(finished, "scores/step-00000008/report.json")["step"] == 8
    with pytest.raises(ValueError, match=r"step \(7\) has no complete checkpoint in .*; there are \[8, 12\]"):
        scoring(finished, 7)


def test_a_longer_run_goes_on_and_another_model_is_refused(finished: PipelineConfig) -> None:
    longer = finished.model_copy(update={"training": finished.training.model_copy(update={"steps": 14})})
    first = (Path(finished.run_uri) / "metrics/train.jsonl").read_text().splitlines()
    assert pretrain(longer).checkpoint_uri.endswith("step-00000014")
    lines = (Path(finished.run_uri) / "metrics/train.jsonl").read_text().splitlines()
    assert lines[:12] == first[:12]
    assert len(lines) == 14
    with pytest.raises(ValueError, match=r"training.steps \(12\) is below the newest checkpoint \(step 14\)"):
        pretrain(finished)
    faster = finished.model_copy(update={"training": longer.training.model_copy(update={"learning_rate": 0.5})})
    with pytest.raises(ValueError, match=r"holds checkpoints with learning_rate 0.002, not 0.5"):
        pretrain(faster)
    wider = longer.model_copy(update={"model": finished.model.model_copy(update={"d_model": 64})})
    with pytest.raises(ValueError, match="holds checkpoints with d_model 32, not 64"):
        scoring(wider)
    with pytest.raises(ValueError, match="holds checkpoints with d_model 32, not 64"):
        pretrain(wider)


def test_a_failed_stage_fails_the_run_with_the_workers_traceback(corpus: str, tmp_path: Path) -> None:
    """prefect 16373; and gpt-neox: resume asked for and nothing loadable is an error, not a start at step 0."""
    config = tiny_config(tmp_path / "run", corpus, training={"resume": "required"})
    with pytest.raises(Exception, match="a checkpoint is required") as failure:
        pretrain(config)
    assert 'File "' in str(failure.value)
    assert "Traceback (most recent call last)" in str(failure.value)
    run, states = flow_run_states("pretrain")
    assert run.state.name == "Failed"
    assert "a checkpoint is required to resume from" in run.state.message
    assert (states["train"], states["terminate"]) == ("Failed", "Completed")
    assert not (tmp_path / "run/metrics/train.jsonl").exists()


def test_below_a_threshold_nothing_is_trained(corpus: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "run", corpus, scaling={"min_tokens_per_second": 1e9})
    with pytest.raises(
        RuntimeError, match=r"no-go, nothing was trained: throughput is [\d.e+]+ tokens/s, must be ≥ 1e"
    ):
        pretrain(config)
    assert not (tmp_path / "run/checkpoints").exists()
    assert read(config, "scaling/report.json")["tokens_per_second"] > 0  # the figures stay, for whoever asks
    run, states = flow_run_states("pretrain")
    assert (run.state.name, states["validate-scaling"]) == ("Failed", "Failed")
    assert "train" not in states


def test_the_janitor_ends_what_has_outlived_its_lease_and_nothing_else(corpus: str, tmp_path: Path) -> None:
    provider = LocalProvider(default_state_dir())
    provider.provision(ClusterRequest("lapsed", 1, 1, 1, lease_seconds=0.01))
    kept = provider.provision(ClusterRequest("kept", 1, 1, 1, lease_seconds=600))
    time.sleep(0.1)
    try:
        assert janitor() == ["lapsed"]
        assert [record.cluster.name for record in provider.list_clusters()] == ["kept"]
    finally:
        provider.terminate(kept.name)


def test_two_runs_never_share_a_cluster(tmp_path: Path, corpus: str) -> None:
    one, same = tiny_config(tmp_path / "one", corpus), tiny_config(f"file:{tmp_path}/one", corpus)
    other = tiny_config(tmp_path / "other", corpus)
    assert cluster_name(one) == cluster_name(same) != cluster_name(other)


def test_a_given_tokenizer_is_used_as_it_is(finished: PipelineConfig, corpus: str, tmp_path: Path) -> None:
    model = Path(finished.run_uri) / "tokenizer/tokenizer.model"
    config = tiny_config(tmp_path / "run", corpus, tokenizer={"uri": str(model)})
    preparation(config)
    assert (tmp_path / "run/tokenizer/tokenizer.model").read_bytes() == model.read_bytes()
    tokens = read(finished, "tokens/manifest.json")["files"]
    assert read(config, "tokens/manifest.json")["files"] == tokens
    with pytest.raises(ValueError, match=r"tokenizer.vocab_size \(600\) must be 500, that of tokenizer.uri"):
        preparation(tiny_config(tmp_path / "run", corpus, tokenizer={"uri": str(model), "vocab_size": 600}))
    with pytest.raises(ValueError, match=r"tokenizer.uri: .*corpus.jsonl is no SentencePiece model"):
        preparation(tiny_config(tmp_path / "run", corpus, tokenizer={"uri": corpus}))


def test_too_many_epochs_are_refused_before_a_cluster_is_there(
    finished: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.pretrain.cluster_for", lambda *_, **__: pytest.fail("a cluster was asked for"))
    layers = {"tokens": {"max_epochs": 0.01}, "training": {"steps": 100}}  # more than any test trained it for
    sections = {name: getattr(finished, name).model_copy(update=fields) for name, fields in layers.items()}
    with pytest.raises(ValueError, match=r"would read the training text .* more than tokens.max_epochs \(0.01\)"):
        pretrain(finished.model_copy(update=sections))
