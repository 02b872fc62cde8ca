"""The whole graph on a run directory in S3, against a real S3 server."""

import json
from pathlib import Path

import pytest
from tiny import tiny_config, write_corpus

from flows.pretrain import pretrain
from infra.storage import open_storage

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def test_a_run_lives_in_s3(s3_bucket: str, tmp_path: Path) -> None:
    corpus = open_storage(f"{s3_bucket}/texts, raw/épo=3")
    corpus.upload(Path(write_corpus(tmp_path)), "part 1/corpus.jsonl")
    config = tiny_config(f"{s3_bucket}/runs/a+b ✓", f"{s3_bucket}/texts, raw/épo=3/**/*.jsonl")
    result = pretrain(config)
    run = open_storage(config.run_uri)
    lines = [json.loads(line) for line in run.read("metrics/train.jsonl").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert run.read("report.html")
    complete = [entry.name for entry in run.list("checkpoints") if entry.name.endswith("complete.json")]
    assert complete == ["checkpoints/step-00000008/complete.json", "checkpoints/step-00000012/complete.json"]
    before = {entry.name: entry.version for entry in run.list()}
    assert pretrain(config) == result
    assert {entry.name: entry.version for entry in run.list()} == before, "a finished run was done again"


def test_local_and_s3_runs_are_the_same_run(s3_bucket: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    local, remote = tiny_config(tmp_path / "run", corpus), tiny_config(f"{s3_bucket}/run", corpus)
    assert pretrain(local).bits_per_byte == pretrain(remote).bits_per_byte
    for name in ("tokenizer/tokenizer.model", "tokens/train/made-up-00000.tokens", "evaluation/report.json"):
        assert open_storage(local.run_uri).read(name) == open_storage(remote.run_uri).read(name)
