"""The plan of the ranks: what fits is planned, what does not is refused with settings that fit."""

import re
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flows.__main__ import main
from model.config import ModelConfig, TrainingConfig
from model.parallel_plan import ParallelConfig, ParallelPlan, plan_parallelism
from tasks.config import PipelineConfig

MODEL = {"n_layer": 12, "n_head": 12, "d_model": 96, "seq_len": 48}
TRAINING = {"global_batch_size": 24, "micro_batch_size": 2, "ramp_start_batch_size": 1}


def configured(nodes: int, ranks_per_node: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration that fits, but for what is given."""
    base = {
        "model": MODEL,
        "training": TRAINING,
        "tokenizer": {"vocab_size": 480},
        "parallel": {},
        "cluster": {"nodes": nodes, "ranks_per_node": ranks_per_node},
    }
    return {name: fields | sections.get(name, {}) for name, fields in base.items()}


def plan(config: dict[str, Any]) -> ParallelPlan:
    nodes, ranks_per_node = config["cluster"].values()
    return plan_parallelism(
        ParallelConfig(**config["parallel"]),
        nodes * ranks_per_node,
        ModelConfig(**config["model"]),
        TrainingConfig(**config["training"]),
        vocab_size=config["tokenizer"]["vocab_size"],
        ranks_per_node=ranks_per_node,
    )


def suggested(message: str) -> list[dict[str, dict[str, int]]]:
    """Each change that the message names."""
    _, _, fixes = message.rpartition(": set ")
    if fixes == "parallel.tp, pp, stages_per_rank and replicas to 1":
        return [{"parallel": dict.fromkeys(("tp", "pp", "stages_per_rank", "replicas"), 1)}]
    found = [re.fullmatch(r"(\w+)\.(\w+) to (\d+)", fix) for fix in fixes.split(", or ")]
    assert all(found), message
    return [{match[1]: {match[2]: int(match[3])}} for match in found if match]


def changed(config: dict[str, Any], change: dict[str, dict[str, int]]) -> dict[str, Any]:
    return {name: fields | change.get(name, {}) for name, fields in config.items()}


@pytest.mark.parametrize(
    ("world", "sections", "message"),
    [
        (
            (1, 6),
            {"parallel": {"tp": 4}},
            "parallel.tp (4) x parallel.pp (1) must divide the 6 ranks (cluster.nodes x cluster.ranks_per_node): "
            "set parallel.tp to 3",
        ),
        (
            (3, 2),
            {"parallel": {"tp": 2, "pp": 2}},
            "parallel.tp (2) x parallel.pp (2) must divide the 6 ranks (cluster.nodes x cluster.ranks_per_node): "
            "set parallel.tp to 1, or parallel.pp to 1, or cluster.nodes to 4",
        ),
        (
            (1, 8),
            {"parallel": {"replicas": 3}},
            "parallel.replicas (3) must divide the 8 data-parallel ranks: set parallel.replicas to 2",
        ),
        (
            (1, 8),
            {"parallel": {"tp": 8}},
            "model.n_head (12) must be divisible by parallel.tp (8): set parallel.tp to 4",
        ),
        (
            (1, 4),
            {"parallel": {"tp": 4}, "model": {"seq_len": 50}},
            "model.seq_len (50) must be divisible by parallel.tp (4): set parallel.tp to 2",
        ),
        (
            (1, 4),
            {"parallel": {"tp": 4}, "tokenizer": {"vocab_size": 262_143}},
            "the vocabulary (262143 pieces) must be divisible by parallel.tp (4): "
            "set tokenizer.vocab_size to 262144, or parallel.tp to 1",
        ),
        (
            (1, 3),  # 262,146 pieces would be more than a tokenizer may have
            {"parallel": {"tp": 3}, "tokenizer": {"vocab_size": 262_144}},
            "the vocabulary (262144 pieces) must be divisible by parallel.tp (3): "
            "set tokenizer.vocab_size to 262143, or parallel.tp to 1",
        ),
        (
            (3, 2),
            {"parallel": {"tp": 3}},
            "parallel.tp (3) must divide cluster.ranks_per_node (2), because its ranks exchange too much to be on "
            "different machines: set parallel.tp to 2",
        ),
        (
            (1, 2),
            {"parallel": {"stages_per_rank": 2}},
            "parallel.stages_per_rank (2) needs a pipeline, parallel.pp above 1: "
            "set parallel.stages_per_rank to 1, or parallel.pp to 2",
        ),
        (
            (1, 4),
            {"parallel": {"pp": 4, "stages_per_rank": 4}},
            "parallel.pp (4) x parallel.stages_per_rank (4) makes 16 stages, more than model.n_layer (12): "
            "set parallel.stages_per_rank to 3, or parallel.pp to 2",
        ),
        (
            (1, 4),
            {"parallel": {"pp": 2}, "training": {"global_batch_size": 18}},
            "with a pipeline, training.global_batch_size (18) must be a multiple of dp (2) x "
            "training.micro_batch_size (2): set training.global_batch_size to 20, or training.micro_batch_size to 1",
        ),
        (
            (1, 4),
            {"parallel": {"pp": 4}, "training": {"micro_batch_size": 8}},
            "the pipeline needs at least parallel.pp (4) micro-batches in a step and gets 3: "
            "set training.global_batch_size to 32, or training.micro_batch_size to 6",
        ),
        (
            (1, 4),
            {"parallel": {"pp": 4, "stages_per_rank": 2}, "training": {"global_batch_size": 28}},
            "the pipeline needs a multiple of parallel.pp (4) micro-batches in a step and gets 14: "
            "set training.global_batch_size to 32, or training.micro_batch_size to 1",
        ),
        (
            (1, 7),
            {"parallel": {"tp": 5, "pp": 2, "stages_per_rank": 9, "replicas": 6}},
            "parallel.tp (5) x parallel.pp (2) must divide the 7 ranks (cluster.nodes x cluster.ranks_per_node): "
            "set parallel.tp, pp, stages_per_rank and replicas to 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_settings_that_fit(
    world: tuple[int, int], sections: dict[str, dict[str, Any]], message: str
) -> None:
    config = configured(*world, **sections)
    with pytest.raises(ValueError, match="set ") as refused:
        plan(config)
    assert str(refused.value) == message
    for change in suggested(message):
        plan(changed(config, change))


@pytest.mark.parametrize(
    ("n_layer", "pp", "stages_per_rank", "sizes"),
    [(5, 2, 1, [3, 2]), (5, 2, 2, [2, 1, 1, 1]), (76, 10, 1, [8] * 6 + [7] * 4), (4, 1, 1, [4]), (3, 3, 1, [1, 1, 1])],
)
def test_the_stages_have_layers_as_even_as_they_go(
    n_layer: int, pp: int, stages_per_rank: int, sizes: list[int]
) -> None:
    stages = ParallelPlan(pp=pp, stages_per_rank=stages_per_rank).stage_layers(n_layer)
    assert [len(layers) for layers in stages] == sizes
    assert list(chain(*stages)) == list(range(n_layer))


few = st.integers(1, 9)
anything = st.builds(
    configured,
    nodes=st.integers(1, 4),
    ranks_per_node=st.sampled_from([1, 2, 3, 4, 6, 8]),
    parallel=st.fixed_dictionaries({"tp": few, "pp": few, "stages_per_rank": st.integers(1, 4), "replicas": few}),
    model=st.fixed_dictionaries(
        {"n_layer": st.integers(1, 13), "n_head": st.sampled_from([2, 4, 6, 12]), "seq_len": st.integers(8, 48)}
    ),
    training=st.fixed_dictionaries({"global_batch_size": st.integers(1, 99), "micro_batch_size": few}),
    tokenizer=st.fixed_dictionaries({"vocab_size": st.integers(300, 262_144)}),
)


@settings(deadline=None, max_examples=400)
@given(config=anything)
def test_there_is_a_plan_or_what_is_suggested_is_one(config: dict[str, Any]) -> None:
    try:
        made = plan(config)
    except ValueError as refused:
        for change in suggested(str(refused)):
            assert_is_a_plan_of(plan(changed(config, change)), changed(config, change))
    else:
        assert_is_a_plan_of(made, config)


def assert_is_a_plan_of(made: ParallelPlan, config: dict[str, Any]) -> None:
    assert made.world_size == made.replicas * made.shards * made.tp * made.pp
    assert made.world_size == config["cluster"]["nodes"] * config["cluster"]["ranks_per_node"]
    n_layer = config["model"]["n_layer"]
    stages = made.stage_layers(n_layer)
    assert list(chain(*stages)) == list(range(n_layer))
    assert min(map(len, stages)) >= 1
    assert all(len(before) - len(after) in (0, 1) for before, after in pairwise(stages))
    assert PipelineConfig.model_validate(config).parallel_plan() == made  # and nothing else is against it


def test_the_configuration_is_refused_as_the_plan_is() -> None:
    with pytest.raises(ValidationError, match=re.escape("parallel.tp (3) x parallel.pp (1) must divide the 2 ranks")):
        PipelineConfig.model_validate(configured(1, 2, parallel={"tp": 3}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parallel.tp", "3"], "parallel.tp (3) x parallel.pp (1) must divide the 2 ranks"),
        (["--parallel.pp", "0"], "parallel.pp: must be greater than or equal to 1, not '0'"),
        (["--parallel.stages-per-rank", "2"], "parallel.stages_per_rank (2) needs a pipeline"),
        (["--parallel.checkpointing", "some"], "parallel.checkpointing: must be 'none', 'selective' or 'full'"),
        (["--parallel.tp", "2", "--tokenizer.vocab-size", "4097"], "the vocabulary (4097 pieces) must be divisible by"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["pretrain", *arguments])
    captured = capsys.readouterr()
    assert exit_.value.code == 2, captured
    assert captured.err.startswith("jumbo: ")
    assert captured.err.count("\n") == 1, "one line"
    assert said in captured.err
