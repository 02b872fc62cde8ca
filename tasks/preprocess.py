"""Stage 1: raw text -> cleaned, filtered, deduplicated, decontaminated documents, split by content."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger

from model.data.filtering.decontamination import Example
from model.data.funnel import Funnel
from model.data.pieces import remove_partial
from model.data.preparation import prepare_documents
from model.evaluation.multiple_choice import Row
from tasks.bad_words import load_bad_words
from tasks.choices import load_choices
from tasks.config import PipelineConfig
from tasks.engine import open_engine, processes
from tasks.manifest import Manifest, digest
from tasks.sources import find_sources, source_versions
from tasks.stage import artifact_key, stage_task
from tasks.stages import preprocess_stage


@stage_task("preprocess")
def preprocess(config: PipelineConfig) -> Manifest:
    """Documents as zstd Parquet shards under documents/{train,validation,test}, with the funnel in the manifest."""
    sources = find_sources(config.data, config.run_uri)
    examples = list(_examples(load_choices(config.evaluation)))
    bad_words = load_bad_words(config.data.filters)
    read = {"evaluation": digest([vars(example) for example in examples]), "bad words": digest(bad_words)}
    stage = preprocess_stage(config, source_versions(sources), read)
    if done := stage.finished():
        return stage.cached(done)
    files = [file for source in sources for file in source.files]
    with stage.workspace() as work, stage.scratch() as out, open_engine(config.engine, stage.progress) as engine:
        remove_partial(work)
        memory_bytes = int(config.engine.memory_gib * 2**30 / processes(config.engine))
        funnel = prepare_documents(files, config.data, examples, work, out, engine, memory_bytes, bad_words)
        records = stage.publish(out)
        stage.say_reuse(engine.reused, engine.made)
        manifest = stage.complete(records, funnel.to_dict(), _summary(funnel))
    _report(config, funnel)
    return manifest


def _examples(choices: dict[str, list[Row]]) -> Iterator[Example]:
    """What is not to be learned: each question, alone and with each of its answers."""
    for name, rows in choices.items():
        for number, row in enumerate(rows, start=1):
            questions = dict.fromkeys(candidate.context for candidate in row.candidates)
            answered = (candidate.context + candidate.completion for candidate in row.candidates)
            yield Example(name, number, (*questions, *answered))


def _report(config: PipelineConfig, funnel: Funnel) -> None:
    logger = get_run_logger()
    for name, counts in funnel.sources.items():
        if not counts.kept:
            logger.warning("source %r kept none of its %d documents: others have them too", name, counts.read)
        for damage in counts.damaged:
            logger.warning("%s: %s; the whole records before the damage are kept", name, damage)
    for name, hits in funnel.contamination.items():
        if hits["found"]:
            logger.warning(
                "%d of the %d examples of the evaluation %r occur in %d documents: the overlaps, and %d characters "
                "before and after each, were removed",
                *(len(hits["found"]), hits["examples"], name, hits["documents"]),
                config.data.decontamination.window_chars,
            )
        if hits["common"]:
            logger.warning(
                "%d of its examples share phrases with more than %d documents: these phrases stay, as common ones",
                *(len(hits["common"]), config.data.decontamination.max_documents),
            )
    create_table_artifact(
        _table(funnel), key=artifact_key("documents", config.run_uri), description="Data funnel by source"
    )


def _summary(funnel: Funnel) -> str:
    read = sum(counts.read for counts in funnel.sources.values())
    kept = {split: counts.documents for split, counts in funnel.splits.items()}
    size = sum(counts.bytes for counts in funnel.splits.values())
    cut_off = sum(counts.cut_off for counts in funnel.sources.values())
    damaged = sum(len(counts.damaged) for counts in funnel.sources.values())
    splits = ", ".join(f"{split} {count:,}" for split, count in kept.items())
    notes = [f"{cut_off:,} more by cutting" if cut_off else "", _dropped(funnel)]
    notes = [note for note in notes if note] + ([f"{damaged} DAMAGED, kept in part"] if damaged else [])
    of = f" ({'; '.join(notes)})" if notes else ""
    return f"{read:,} documents read{of}, {sum(kept.values()):,} kept ({splits}), {size / 1e6:.1f} MB"


def _dropped(funnel: Funnel) -> str:
    """The reasons for what was dropped, or would have been, the most frequent first."""
    dropped, would = Counter[str](), Counter[str]()
    for counts in funnel.sources.values():
        dropped.update(counts.dropped)
        would.update(counts.would_drop)
    said = []
    if dropped:
        said.append(f"dropped {dropped.total():,}: {_reasons(dropped)}")
    if would and not dropped.keys() >= would.keys():
        said.append(f"the rules would drop {would.total():,}: {_reasons(would)}")
    return "; ".join(said)


def _reasons(counts: Counter[str]) -> str:
    said = [f"{reason} {count:,}" for reason, count in counts.most_common(3)]
    return ", ".join([*said, "…"] if len(counts) > 3 else said)


def _table(funnel: Funnel) -> list[dict[str, Any]]:
    return [
        {"source": name, "files": counts.files, "read": counts.read, "kept": counts.kept}
        | {f"dropped: {reason}": dropped for reason, dropped in sorted(counts.dropped.items())}
        for name, counts in funnel.sources.items()
    ]
