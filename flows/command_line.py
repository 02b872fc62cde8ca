"""The commands and options of `jumbo`, their help, and what is said of one that is unknown."""

import json
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, create_model
from pydantic_settings import CLI_SUPPRESS, BaseSettings, CliPositionalArg, CliSubCommand, SettingsConfigDict

from flows.presets import preset, preset_names
from infra.chaos.plan import Kind
from tasks.config import PipelineConfig

_PRESET = Field("laptop", description=f"Configuration to start from: {', '.join(preset_names())}.")

# What the help of a command shows: what the command reads. It takes the other options too, since a run has one
# configuration, which goes into its directory.
_RUN = ("preset", "run_uri", "seed")
_PREPARATION = (
    *(*_RUN, "engine", "data", "tokenizer", "tokens"),
    "evaluation.multiple_choice",  # cut out of the documents
    *("model.seq_len", "training.steps", "training.global_batch_size"),  # how often training will read a source
)
_SCALING = (*_PREPARATION, "model", "training", "parallel", "cluster", "scaling")
_SCORING = (*_RUN, "cluster", "evaluation")


def _options(section: type[BaseModel], values: BaseModel, shown: tuple[str, ...], prefix: str = "") -> dict[str, Any]:
    """The fields of a section as the command line shows them: bounds in the descriptions, `values` as the defaults."""
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        value, path = getattr(values, name), prefix + name
        if isinstance(value, BaseModel):
            nested = create_model(name, **_options(type(value), value, shown, f"{path}."))
            said = field.description if _is_shown(path, shown, any_part=True) else CLI_SUPPRESS
            fields[name] = (nested, Field(nested(), description=said))
        else:
            bounds = [f"{sign} {limit}" for sign, limit in _bounds(field.metadata)]
            said = f"{field.description} [{', '.join(bounds)}]" if bounds else field.description
            # A list is one value or a JSON array: it is read as it stands, with commas and escapes.
            is_list = get_origin(field.annotation) is tuple
            default = json.dumps(values.model_dump(mode="json")[name]) if is_list else value
            said = said if _is_shown(path, shown) else CLI_SUPPRESS
            fields[name] = (str if is_list else field.annotation, Field(default, description=said))
    return fields


def _is_shown(path: str, shown: tuple[str, ...], any_part: bool = False) -> bool:
    return any(f"{path}.".startswith(f"{name}.") or (any_part and f"{name}.".startswith(f"{path}.")) for name in shown)


def _bounds(metadata: list[Any]) -> list[tuple[str, Any]]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return [(sign, getattr(rule, key)) for rule in metadata for key, sign in signs.items() if hasattr(rule, key)]


def _configured(*shown: str) -> Any:
    """The base of a command that takes the whole configuration."""
    options = _options(PipelineConfig, preset("laptop"), shown)
    return create_model("Configured", preset=(str, _PRESET), **options)


class Pretrain(_configured(*_RUN, *PipelineConfig.model_fields)):  # type: ignore[misc]
    """The whole graph: raw text -> documents -> tokenizer -> tokens -> scaling validation -> training -> evaluation ->
    report. Run it again with the same --run-uri and it continues where it stopped.

      jumbo pretrain --preset laptop --run-uri runs/mine --training.steps 50
      jumbo pretrain --run-uri runs/mine --training.steps 500      # goes on, with all else as it was

    Most used:
      --preset                     what to start from
      --run-uri                    where the run lives
      --data.sources               your own text: a path, a pattern in quotes, an s3:// URI, or a JSON array
      --tokenizer.vocab-size       pieces of the vocabulary
      --model.n-layer, --model.d-model, --model.n-head, --model.seq-len
      --training.steps, --training.global-batch-size, --training.learning-rate
      --cluster.ranks-per-node     processes that train
    """


class Prepare(_configured(*_PREPARATION)):  # type: ignore[misc]
    """Documents, tokenizer and token shards only; needs no cluster. `jumbo pretrain` with the same --run-uri goes on
    from there. Options of the other sections (jumbo pretrain --help) are taken too, and kept for it.

      jumbo prepare --run-uri runs/mine --data.sources 'texts/*.txt'
      jumbo prepare --run-uri runs/mine --data.filters.score-only true    # first see what the rules would drop

    Most used:
      --run-uri                    where the run lives
      --data.sources               your own text: a path, a pattern in quotes, an s3:// URI, or a JSON array
      --data.filters.score-only    drop nothing by rules, and draw the scores in report.html
      --data.filters.languages     languages to keep, such as '["en", "de"]'
      --tokenizer.vocab-size       pieces of the vocabulary
      --tokenizer.uri              take a SentencePiece model that exists
      --engine.processes           processes that work
    """


class ValidateScaling(_configured(*_SCALING)):  # type: ignore[misc]
    """Measure the cluster with the real model and hold the figures against the thresholds: go or no-go. What it needs
    of the data is prepared first.

      jumbo validate-scaling --run-uri runs/mine --scaling.min-tokens-per-second 2000

    Most used:
      --run-uri                    where the run lives
      --cluster.nodes, --cluster.ranks-per-node
      --scaling.min-tokens-per-second, --scaling.min-efficiency, --scaling.max-peak-memory-gib
    """


class Score(_configured(*_SCORING)):  # type: ignore[misc]
    """Evaluate a checkpoint of a run again, with the evaluation settings given here.

      jumbo score --run-uri runs/mine --step 40
      jumbo score --run-uri runs/mine --evaluation.prompts '["The House", "My fellow citizens"]'

    Most used:
      --run-uri                    where the run lives
      --step                       which checkpoint
      --evaluation.multiple-choice, --evaluation.prompts, --evaluation.max-test-bytes
    """

    step: int | None = Field(None, description="Step of the checkpoint; the newest complete one if not given.")


class InspectDocuments(BaseModel):
    """Sizes by source, languages, and some documents with their scores.

    Example: jumbo inspect documents runs/mine --source web --number 5
    Example: jumbo inspect documents runs/mine --dropped all
    """

    target: CliPositionalArg[str] = Field(description="A run directory, or a .parquet file of documents; s3:// too.")
    split: str = Field("train", description="Split of the run: train, validation or test.")
    source: str = Field("", description="Source of the run; the first if not given.")
    number: int = Field(3, ge=0, description="Documents to show, evenly spaced over a file. [>= 0]")
    dropped: str = Field("", description="Show what was dropped for this reason or rule set instead; or all.")


class InspectTokens(BaseModel):
    """Token shards: sizes by source, lengths, frequent pieces, and one document with its pieces made visible.

    Example: jumbo inspect tokens runs/mine --document 7
    """

    target: CliPositionalArg[str] = Field(description="A run directory, or a .tokens file; s3:// too.")
    split: str = Field("train", description="Split of the run: train, validation or test.")
    source: str = Field("", description="Source of the run; the first if not given.")
    document: int = Field(0, ge=0, description="Document of the shard to show, counted from 0. [>= 0]")
    tokenizer: str = Field("", description="The tokenizer.model of a .tokens file that lies in no run directory.")


class Inspect(BaseModel):
    """Look at what a run, or one of its files, holds."""

    documents: CliSubCommand[InspectDocuments] = Field(description="Documents with their scores.")
    tokens: CliSubCommand[InspectTokens] = Field(description="Token shards, piece by piece.")


class Chaos(BaseModel):
    """Train a tiny model in quiet, then again while ranks, nodes and the flow are killed, checkpoints are damaged and
    the disk is full; the weights must be the same to the bit. Exit code 0 where they are.

      jumbo chaos --minutes 5
      jumbo chaos --storage s3 --kinds s3-errors,s3-stalls,power --seed 7
    """

    minutes: float = Field(5.0, gt=0, le=1440, description="How long faults come. [> 0, <= 1440]")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of what comes when, and of the run. [>= 0]")
    run_uri: str = Field("", description="New directory for runs and logs; a temporary one in runs/ if not given.")
    storage: Literal["file", "s3"] = Field("file", description="Where the run lives; s3 starts a server.")
    kinds: str = Field("", description=f"Faults that come, joined by commas; all if not given: {', '.join(Kind)}.")


class Janitor(BaseModel):
    """End every cluster on this machine whose lease has expired or whose owner is dead."""


class Doctor(BaseModel):
    """What is installed, what is missing, and what this machine can run."""


class Jumbo(BaseSettings):
    """Train your own Jurassic-class language model, end to end.

    Values come from --preset, then JUMBO_… variables (JUMBO_TRAINING__STEPS=50), then the options given here. Without
    --preset, a run directory that was used before brings its own values (its config.yaml), and a new one those of the
    preset laptop, which a command's --help shows.
    """

    model_config = SettingsConfigDict(
        cli_prog_name="jumbo",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    pretrain: CliSubCommand[Pretrain] = Field(description="The whole graph: raw text to an evaluated model.")
    prepare: CliSubCommand[Prepare] = Field(description="Documents, tokenizer and token shards only; no cluster.")
    validate_scaling: CliSubCommand[ValidateScaling] = Field(description="Measure the cluster: go or no-go.")
    score: CliSubCommand[Score] = Field(description="Evaluate any checkpoint of a run again.")
    inspect: CliSubCommand[Inspect] = Field(description="Look at documents or token shards.")
    chaos: CliSubCommand[Chaos] = Field(description="Show that a run survives faults: kills, full disks, damage.")
    janitor: CliSubCommand[Janitor] = Field(description="End clusters whose lease has expired.")
    doctor: CliSubCommand[Doctor] = Field(description="What is installed and what this machine can run.")


class HelpFormatter(RawDescriptionHelpFormatter):
    """Help that begins with what a person looks for: no list of a hundred options stands before it."""

    def add_usage(
        self, usage: str | None, actions: Iterable[Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        actions = list(actions)
        if len(actions) > 10:
            usage = "%(prog)s [option ...]"
        super().add_usage(usage, actions, groups, prefix)

    def add_text(self, text: str | None) -> None:
        super().add_text(text and text.replace("\n    ", "\n"))  # the indentation of a docstring


def explain(error: str, arguments: list[str]) -> str:
    """What the parser says of arguments that it refuses; of an unknown command or option, with the nearest there is."""
    section: type[BaseModel] = Jumbo
    command, given = "jumbo", list(arguments)
    while (commands := _commands(section)) and given and not given[0].startswith("-"):
        name = given.pop(0)
        if name not in commands:
            return f"unknown command {name!r} {_hint(get_close_matches(name, commands, n=1), command)}"
        section, command = commands[name], f"{command} {name}"
    if commands and given:
        return f"{command} takes no option {given[0].split('=')[0]} before a command {_hint([], command)}"
    message = error.removeprefix("error parsing CLI: ")
    if not message.startswith("unrecognized arguments: "):
        return message
    refused = message.removeprefix("unrecognized arguments: ")
    argument = max((argument for argument in arguments if refused.startswith(argument)), key=len, default=refused)
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r} (put a pattern in quotes, and several values into a JSON array)"
    option = argument.split("=")[0]
    names = _option_names(section)
    of_a_section = [name for name in names if name.endswith(f".{option.lstrip('-')}")]
    return f"unknown option {option} {_hint(of_a_section or get_close_matches(option, names, n=1), command)}"


def _hint(near: list[str], command: str) -> str:
    return f"(did you mean {' or '.join(near)}?)" if near else f"(see {command} --help)"


def _commands(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The commands of a command, by name."""
    fields = section.model_fields.items() if section in (Jumbo, Inspect) else ()
    return {name.replace("_", "-"): get_args(field.annotation)[0] for name, field in fields}


def _option_names(section: type[BaseModel], prefix: str = "--") -> list[str]:
    names = []
    for name, field in section.model_fields.items():
        if field.is_required():
            continue  # an argument by its place, not an option
        option = prefix + name.replace("_", "-")
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        names += _option_names(field.annotation, f"{option}.") if nested else [option]  # type: ignore[arg-type]
    return names
