"""The command line: wrong input gives one clear line and exit code 2, before anything runs."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import option_list, write_corpus

from flows.__main__ import main
from flows.presets import preset, preset_names
from tasks.preflight import check_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says when it refuses its input."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured
    assert captured.err.startswith("jumbo: ")
    assert captured.err.count("\n") == 1, "one line"
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--training.steps", "0"], "training.steps: must be greater than or equal to 1, not '0'"),
        (["--training.steps", "many"], "training.steps: must be a valid integer"),
        (["--training.steps"], "--training.steps: expected one argument"),
        (["--model.d-model", "65"], "model: d_model (65) must be divisible by n_head (4)"),
        (["--model.dropout", "nan"], "model.dropout: must be"),
        (["--training.learning-rate", "inf"], "training.learning_rate: must be"),
        (["--tokenizer.vocab-size", "262145"], "tokenizer.vocab_size: must be less than or equal to 262144"),
        (
            ["--training.ramp-start-batch-size", "99"],
            "ramp_start_batch_size (99) must not exceed global_batch_size (16)",
        ),
        (["--data.sources", "[{"], "data.sources: is not JSON"),
        (["--scaling.max-peak-memory-gib", "inf"], "scaling.max_peak_memory_gib: must be a finite number, not 'inf'"),
        (["--scaling.all-reduce-mib", "-1"], "scaling.all_reduce_mib.0: must be greater than or equal to 1, not '-1'"),
        (["--evaluation.multiple-choice", '[{"name": "x"}]'], "evaluation.multiple_choice.0.uri: field required"),
        (["--preset", "desktop"], "preset 'desktop' is unknown; the presets are j1-grande, j1-jumbo, j1-large, laptop"),
        (["--preset", "j1-jumbo"], "cluster.provider 'ec2' is not available in this version; use 'local'"),
        (["--cluster.provider", "slurm"], "cluster.provider: must be 'local' or 'ec2', not 'slurm'"),
        (["--data.sources", "/nowhere/*.txt"], "data.sources.0.uri: '/nowhere/*.txt' finds no file"),
        (["--data.sources", "gs://bucket/x.txt"], "data.sources.0.uri: 'gs://bucket' has an unknown scheme"),
        (["--data.sources", "[]"], "data.sources is empty; name your text"),
        (["--data.sources", '[{"uri": "x", "urn": "y"}]'], "data.sources.0.urn: unknown field (did you mean uri?)"),
        (
            ["--data.sources", '[{"uri": "x", "text_field": "y"}]'],
            "data.sources.0.text_field: unknown field (did you mean text_fields?)",
        ),
        (
            ["--data.sources", '[{"uri": "x", "column": "y"}]'],
            "data.sources.0.column: unknown field (there are uri, name, text_fields, txt_document, encoding, weight)",
        ),
        (["--data.filters.languages", "eng"], "data.filters.languages.0: 'eng' is no code of a language"),
        (
            ["--evaluation.multiple-choice", '[{"name": "x", "uri": "/nowhere.jsonl"}]'],
            "evaluation.multiple_choice.0.uri: '/nowhere.jsonl' finds 0 files; it must name one",
        ),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert said in refusal(["pretrain", "--run-uri", str(tmp_path / "run"), *arguments], capsys)
    assert not (tmp_path / "run/documents").exists()


def test_a_list_is_one_value_or_a_json_array(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a,b ü\n.png").write_bytes(b"x")
    plain = refusal(["prepare", "--data.sources", f"{tmp_path}/a,b*.png"], capsys)
    quoted = refusal(["prepare", "--data.sources", json.dumps([{"uri": f"{tmp_path}/a,b ü\n.png"}])], capsys)
    assert "a,b ü" in plain.replace("\\n", "\n")
    assert "the suffix is none of" in quoted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("pretrain --training.stps 5", "unknown option --training.stps (did you mean --training.steps?)"),
        ("prepare --data.sorces x.txt", "unknown option --data.sorces (did you mean --data.sources?)"),
        ("prepare --data.sorces=x.txt", "unknown option --data.sorces (did you mean --data.sources?)"),
        ("prepare --run_uri x", "unknown option --run_uri (did you mean --run-uri?)"),
        ("prepare --vocab-size 500", "unknown option --vocab-size (did you mean --tokenizer.vocab-size?)"),
        (
            "prepare --min-words 5",
            "unknown option --min-words "
            "(did you mean --data.filters.gopher.min-words or --data.decontamination.min-words?)",
        ),
        ("pretrain --nothing-like-it 5", "unknown option --nothing-like-it (see jumbo pretrain --help)"),
        ("score --stp 5", "unknown option --stp (did you mean --step?)"),
        ("inspect documents x --numbr 5", "unknown option --numbr (did you mean --number?)"),
        ("inspect tokens x --documnt=5", "unknown option --documnt (did you mean --document?)"),
        ("inspect tokens x --number 5", "unknown option --number (see jumbo inspect tokens --help)"),
        ("janitor --run-uri x", "unknown option --run-uri (see jumbo janitor --help)"),
        ("--preset=laptop pretrain", "jumbo takes no option --preset before a command (see jumbo --help)"),
        (
            "inspect --number 5 documents x",
            "jumbo inspect takes no option --number before a command (see jumbo inspect --help)",
        ),
        ("prepair", "unknown command 'prepair' (did you mean prepare?)"),
        ("pretrian --training.steps 5", "unknown command 'pretrian' (did you mean pretrain?)"),
        ("validate_scaling", "unknown command 'validate_scaling' (did you mean validate-scaling?)"),
        ("inspect token x", "unknown command 'token' (did you mean tokens?)"),
        ("xyzzy", "unknown command 'xyzzy' (see jumbo --help)"),
        (
            "prepare --data.sources a.txt b.txt",
            "unexpected argument 'b.txt' (put a pattern in quotes, and several values into a JSON array)",
        ),
    ],
)
def test_what_is_unknown_is_named_with_the_nearest(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(arguments.split(), capsys) == f"jumbo: {said}\n"


def test_an_unknown_option_with_spaces_is_named_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unexpected argument 'my texts/b.txt'" in refusal(["prepare", "--seed", "1", "my texts/b.txt", "c"], capsys)


def test_a_wrong_variable_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUMBO_TRAINING__STEPS", "-1")
    assert "training.steps: must be greater than or equal to 1, not '-1'" in refusal(["pretrain"], capsys)
    monkeypatch.setenv("JUMBO_TRAINING__STEPS", "5")
    monkeypatch.setenv("JUMBO_TRAINING__STPS", "5")
    assert "training.stps: unknown field (did you mean steps?)" in refusal(["pretrain"], capsys)
    monkeypatch.delenv("JUMBO_TRAINING__STPS")
    monkeypatch.setenv("JUMBO_TRIANING__STEPS", "5")
    assert "JUMBO_TRIANING__STEPS: unknown field" in refusal(["pretrain"], capsys)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", b"", "finds only empty files"),
        ("picture.png", b"\x89PNG", "picture.png: the suffix is none of .jsonl, .ndjson, .json, .csv"),
        ("broken.jsonl.gz", b"this is no gzip file", "broken.jsonl.gz cannot be read"),
        ("broken.txt.zst", b"this is no zstd file", "broken.txt.zst cannot be read"),
        ("broken.parquet", b"PAR1 this is no parquet file", "broken.parquet cannot be read"),
        ("cut.jsonl.gz", gzip.compress(b"{}\n", mtime=0)[:8], "cut.jsonl.gz cannot be read"),
        ("repeated.txt", b"word " * 100_000, "tokenizer.vocab_size (4096) is more than the corpus supports"),
        (
            "other.jsonl",
            b'{"content": "a"}\n' * 3,
            "data.sources.0.text_fields: 'text' is no field of other.jsonl, which has content",
        ),
        ("empty.jsonl", b'{"text": null}\n' * 3, "hold no text (3 no_text_field)"),
        (
            "other.csv",
            b"id;body\n1;a\n",
            "data.sources.0.text_fields: 'text' is no field of other.csv, which has id, body",
        ),
        ("small.txt", b"Fellow-Citizens of the Senate", "tokenizer.vocab_size (4096) is more than the corpus supports"),
    ],
)
def test_wrong_sources_are_refused(
    name: str, content: bytes, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    arguments = ["prepare", "--run-uri", str(tmp_path / "run"), "--data.sources", str(tmp_path / name)]
    assert said in refusal(arguments, capsys)


def test_a_run_that_cannot_fit_the_disk_is_refused(
    corpus: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A model of 4.8 T parameters: three checkpoints of 12 bytes each are beyond any disk."""
    arguments = ["pretrain", *option_list(tmp_path / "run", corpus), "--model.n-layer", "1000"]
    arguments += ["--model.d-model", "20000", "--tokenizer.vocab-size", "500"]
    said = refusal(arguments, capsys)
    assert "has no space left for this run: about" in said
    assert str(tmp_path / "run") in said


def test_a_run_directory_that_cannot_be_written_is_refused(
    corpus: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    said = refusal(["pretrain", *option_list(tmp_path / "file" / "run", corpus)], capsys)
    assert "cannot be written" in said


def test_s3_without_credentials_is_refused(
    corpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for arguments in (["pretrain", "--run-uri", "s3://bucket/run"], ["prepare", "--data.sources", "s3://bucket/x.txt"]):
        assert "s3://bucket" in (said := refusal(arguments, capsys))
        assert "credentials" in said


def test_scoring_a_run_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "holds no finished documents/" in refusal(["score", "--run-uri", str(tmp_path)], capsys)


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        main([*command.split(), "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    said = help_of("pretrain", capsys)
    assert said.startswith("usage: jumbo pretrain [option ...]\n")
    assert "--training.checkpoint-every-steps int" in said
    assert "Optimizer steps of the whole run. [>= 1] (default: 180)" in " ".join(said.split())
    assert "Steps between checkpoints" in said


@pytest.mark.parametrize("command", ["pretrain", "prepare", "validate-scaling", "score"])
def test_the_first_screen_of_help_has_examples_and_what_is_most_used(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _, options = help_of(command, capsys).partition("\noptions:\n")
    assert len(first.splitlines()) <= 24
    assert f"\n  jumbo {command} --" in first
    named = set(re.findall(r"--[a-z][a-z0-9.-]*", first)) - {"--help"}
    assert "--run-uri" in named
    assert not {option for option in named if f"  {option} " not in options}, "named, but no option that is shown"


# Not shown are the sections that the command does not read; it takes them, since a run has one configuration.
@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        (
            "prepare",
            "data tokenizer tokens engine evaluation.multiple-choice model.seq-len",
            "cluster scaling model.n-layer training.learning-rate evaluation.prompts",
        ),
        ("score", "evaluation cluster step", "data tokenizer tokens engine model training scaling"),
        ("validate-scaling", "data model training cluster scaling", "evaluation.prompts"),
    ],
)
def test_help_shows_what_the_command_reads(
    command: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = help_of(command, capsys).partition("\noptions:\n")[2]
    for name in shown.split():
        assert f"--{name}" in options
    for name in hidden.split():
        assert f"--{name}" not in options
        assert f"{name} options" not in options
    said = refusal([command, "--training.steps", "0", "--model.n-layer", "3"], capsys)
    assert said == "jumbo: training.steps: must be greater than or equal to 1, not '0'\n"


def test_doctor_says_what_this_machine_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    said = capsys.readouterr().out
    assert "sentencepiece" in said
    assert "177.95B" in said  # the published count, tied
    assert "7.53B" in said


def test_every_preset_loads() -> None:
    assert preset_names() == ["j1-grande", "j1-jumbo", "j1-large", "laptop"]
    # The white paper's table: 300B tokens in batches of 3.2M (Jumbo) and 2M (Large) tokens.
    for name, batch_tokens in (("j1-jumbo", 3.2e6), ("j1-large", 2e6)):
        config = preset(name)
        assert config.training.global_batch_size * config.model.seq_len == pytest.approx(batch_tokens, rel=0.05)
        assert config.training.steps * batch_tokens == pytest.approx(300e9, rel=0.05)


def test_layers_are_merged_in_order_and_environment_lies_between(
    corpus: str, tmp_path: Path, prefect_server: str
) -> None:
    """Preset < environment < command line, in a process of its own; and a second run is cached."""
    environment = os.environ | {"JUMBO_TOKENIZER__VOCAB_SIZE": "450", "JUMBO_TOKENIZER__MAX_PIECE_CHARS": "20"}
    options = option_list(tmp_path / "run", corpus)
    command = [sys.executable, "-m", "flows", "prepare", *options, "--tokenizer.vocab-size", "480"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert [line.split()[:2] for line in first.stdout.splitlines()] == [
        ["✓", "preprocess"],
        ["✓", "tokenizer"],
        ["✓", "tokens"],
        ["✓", "report"],
        ["Result:", f"{tmp_path}/run/tokens"],
    ]
    report = json.loads((tmp_path / "run/tokenizer/manifest.json").read_text())
    assert report["counts"]["vocab_size"] == 480
    # The run's own configuration is taken where no preset is named, so that nothing has to be repeated.
    again = [*command[:4], "--run-uri", str(tmp_path / "run")]
    second = subprocess.run(again, capture_output=True, text=True, timeout=120, check=False)
    assert [line.split()[:3] for line in second.stdout.splitlines()[:-2]] == [
        ["•", "preprocess", "cached"],
        ["•", "tokenizer", "cached"],
        ["•", "tokens", "cached"],
    ]


def test_a_first_look_at_documents_asks_no_vocabulary(tmp_path: Path) -> None:
    """No tokenizer is trained where filters are only scored; `pretrain` would train one."""
    (tmp_path / "a.txt").write_text("Fellow-Citizens of the Senate")
    layer = {
        "run_uri": str(tmp_path / "run"),
        "data": {"sources": [str(tmp_path / "a.txt")], "filters": {"score_only": True}},
    }
    check_run(preset("laptop", layer), needs_cluster=False)
    with pytest.raises(ValueError, match=r"vocab_size \(4096\) is more than the corpus supports"):
        check_run(preset("laptop", layer))
