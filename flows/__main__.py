"""The command line, `jumbo`: every command takes the flow's own configuration, over a preset and the environment."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, get_origin

# Prefect's console lines give way to one line a stage; errors are printed once, by main().
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

import yaml
from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_settings import (
    BaseSettings,
    CliPositionalArg,
    CliSettingsSource,
    CliSubCommand,
    EnvSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from flows.presets import configuration, describe, preset, preset_names
from tasks.config import PipelineConfig

# Not the configuration's: where clusters are recorded, and what their processes are marked with.
_OTHER_VARIABLES = {
    "JUMBO_STATE_DIR",
    "JUMBO_CLUSTER_RECORD",
    "JUMBO_NODE",
    "JUMBO_RENDEZVOUS",
    "JUMBO_SUPERVISOR",
}


class _Environment(PipelineConfig, BaseSettings):
    """PipelineConfig read from variables such as JUMBO_TRAINING__STEPS."""

    model_config = SettingsConfigDict(env_prefix="JUMBO_", env_nested_delimiter="__", extra="forbid")


def _options(section: type[BaseModel], values: BaseModel, **first: Any) -> Any:
    """The section as the command line shows it: bounds in the descriptions, `values` as the defaults."""
    fields = dict(first)
    for name, field in section.model_fields.items():
        value = getattr(values, name)
        if isinstance(value, BaseModel):
            nested = _options(type(value), value)
            fields[name] = (nested, Field(nested(), description=field.description))
        else:
            bounds = [f"{sign} {limit}" for sign, limit in _bounds(field.metadata)]
            said = f"{field.description} [{', '.join(bounds)}]" if bounds else field.description
            # A list is one value or a JSON array: it is read by _lists, commas and escapes as they stand.
            is_list = get_origin(field.annotation) is tuple
            shown = json.dumps(values.model_dump(mode="json")[name]) if is_list else value
            fields[name] = (str if is_list else field.annotation, Field(shown, description=said))
    return create_model(section.__name__, __doc__=section.__doc__, **fields)


def _bounds(metadata: list[Any]) -> list[tuple[str, Any]]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return [(sign, getattr(rule, key)) for rule in metadata for key, sign in signs.items() if hasattr(rule, key)]


_PRESET = Field("laptop", description=f"Configuration to start from: {', '.join(preset_names())}.")
_Configured: Any = _options(PipelineConfig, preset("laptop"), preset=(str, _PRESET))


class Pretrain(_Configured):
    """The whole graph: raw text -> documents -> tokenizer -> tokens -> scaling validation -> training -> evaluation ->
    report. Run it again with the same --run-uri and it continues where it stopped.

    Example: jumbo pretrain --preset laptop --run-uri runs/mine --training.steps 50
    """


class Prepare(_Configured):
    """Documents, tokenizer and token shards only; needs no cluster.

    Example: jumbo prepare --run-uri runs/mine --data.sources 'texts/*.txt'
    """


class ValidateScaling(_Configured):
    """Measure the cluster with the real model and hold the figures against the thresholds: go or no-go."""


class Score(_Configured):
    """Evaluate a checkpoint of a run again, with the evaluation settings given here.

    Example: jumbo score --run-uri runs/mine --step 40
    """

    step: int | None = Field(None, description="Step of the checkpoint; the newest complete one if not given.")


class InspectDocuments(BaseModel):
    """Sizes by source, languages, and some documents with their scores.

    Example: jumbo inspect documents runs/mine --source web --number 5
    """

    target: CliPositionalArg[str] = Field(description="A run directory, or a .parquet file of documents; s3:// too.")
    split: str = Field("train", description="Split of the run: train, validation or test.")
    source: str = Field("", description="Source of the run; the first if not given.")
    number: int = Field(3, ge=0, description="Documents to show, evenly spaced over a file. [>= 0]")


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
    janitor: CliSubCommand[Janitor] = Field(description="End clusters whose lease has expired.")
    doctor: CliSubCommand[Doctor] = Field(description="What is installed and what this machine can run.")


def main(arguments: list[str] | None = None) -> None:
    """Run one command. Exit code 2: the input is wrong, nothing ran; 1: the run failed; 130: interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        command, options = _parse(arguments or ["--help"])
        run = _prepare_command(command, options)
    except (ValueError, OSError) as error:
        _fail(str(error).replace("\n", "\\n"), 2)  # one line, whatever a file is called
    run()


def _parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and the options that were given, as nested fields; values are still text."""
    try:
        given = CliSettingsSource[Any](Jumbo, cli_parse_args=arguments, cli_exit_on_error=False)()
    except SettingsError as error:
        raise ValueError(_explain(str(error), arguments)) from None
    command = next(name for name in Jumbo.model_fields if isinstance(given.get(name), dict))
    options = {key: value for key, value in given[command].items() if value is not None}
    if command == "inspect":
        return command, options
    return command, _lists(PipelineConfig, options)


def _lists(section: type[BaseModel], given: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The options with those of lists read: a JSON array or object, or one value as it stands."""
    read = dict(given)
    for name, value in given.items():
        field = section.model_fields.get(name)
        if field and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            read[name] = _lists(field.annotation, value, f"{prefix}{name}.") if isinstance(value, dict) else value
        elif field and get_origin(field.annotation) is tuple and isinstance(value, str):
            try:
                parsed = json.loads(value) if value.lstrip().startswith(("[", "{")) else value
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{prefix}{name}: is not JSON ({error}); a list is one value or a JSON array"
                ) from None
            read[name] = parsed if isinstance(parsed, list) else [parsed]
    return read


def _explain(error: str, arguments: list[str]) -> str:
    message = error.removeprefix("error parsing CLI: ")
    if not message.startswith("unrecognized arguments: "):
        return message
    option = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
    near = get_close_matches(option, _option_names(PipelineConfig), n=1)
    hint = f" (did you mean {near[0]}?)" if near else f" (see jumbo {arguments[0]} --help)"
    return f"unknown field: {option}{hint}"


def _option_names(section: type[BaseModel], prefix: str = "--") -> list[str]:
    names = []
    for name, field in section.model_fields.items():
        option = prefix + name.replace("_", "-")
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        names += _option_names(field.annotation, f"{option}.") if nested else [option]  # type: ignore[arg-type]
    return names


def _prepare_command(command: str, options: dict[str, Any]) -> Callable[[], None]:
    """What is left to run once the input has been found good.

    Raises:
        ValueError: the input is wrong.
    """
    if command == "doctor":
        from flows.doctor import doctor

        return doctor
    if command == "janitor":
        from flows.janitor import janitor

        return lambda: _run(janitor)
    if command == "inspect":
        return _inspection(options)
    step = options.pop("step", None)
    config = _configuration(options.pop("preset", None), _environment(), options)
    from tasks.preflight import check_run, check_scoring

    if command == "score":
        from flows.scoring import scoring

        if step is not None and not str(step).isdecimal():
            raise ValueError(f"step: must be a whole number, not {step!r}")
        check_scoring(config, step := None if step is None else int(step))
        return lambda: _run(scoring, config, step)
    check_run(config, needs_cluster=command != "prepare")
    return lambda: _run(_flow(command), config)


def _inspection(options: dict[str, Any]) -> Callable[[], None]:
    """Read what is to be seen; what is left is to print it."""
    from flows.inspection import show_documents, show_tokens
    from tasks.inspection import see_documents, see_tokens

    if not options:
        raise ValueError("inspect what? jumbo inspect documents RUN, or jumbo inspect tokens RUN")
    ((kind, given),) = options.items()
    given = {name: value for name, value in given.items() if value is not None}
    section = InspectDocuments if kind == "documents" else InspectTokens
    try:
        wanted = section.model_validate(given).model_dump()
    except ValidationError as error:
        raise ValueError(describe(error)) from None
    if kind == "documents":
        documents = see_documents(**wanted)
        return lambda: show_documents(documents)
    tokens = see_tokens(**wanted)
    return lambda: show_tokens(tokens)


def _configuration(name: str | None, environment: dict[str, Any], options: dict[str, Any]) -> PipelineConfig:
    """The options over the environment over the preset that is named; else over what the run was last made with.

    A run that is continued keeps its sources and all else, without their being repeated.
    """
    from infra.storage import open_storage

    run_uri = options.get("run_uri") or environment.get("run_uri")
    if name is None and run_uri:
        with suppress(OSError):  # none yet; what else is wrong with the place is found before the run starts
            before = yaml.safe_load(open_storage(run_uri).read("config.yaml"))
            return configuration(before, environment, options)
    return preset(name or "laptop", environment, options)


def _environment() -> dict[str, Any]:
    """The configuration that JUMBO_… variables give."""
    for name in os.environ:
        field = name.removeprefix("JUMBO_").split("__")[0].lower()
        if name.startswith("JUMBO_") and name not in _OTHER_VARIABLES and field not in PipelineConfig.model_fields:
            raise ValueError(f"{name}: unknown field; variables are JUMBO_ and the field's path, joined by __")
    try:
        return EnvSettingsSource(_Environment)()
    except SettingsError as error:
        raise ValueError(f"a JUMBO_ variable cannot be read: {error}") from None


def _flow(command: str) -> Callable[..., Any]:
    if command == "prepare":
        from flows.preparation import preparation

        return preparation
    if command == "validate_scaling":
        from flows.scaling_validation import scaling_validation

        return scaling_validation
    from flows.pretrain import pretrain

    return pretrain


def _run(flow: Callable[..., Any], *parameters: Any) -> None:
    """Run a flow with its stages drawn in the terminal."""
    from flows.console import show_stages
    from tasks.manifest import Manifest

    display = show_stages()
    try:
        result = flow(*parameters)
    except KeyboardInterrupt:
        display.close()
        _fail("interrupted; the same command continues where it stopped", 130)
    except Exception as error:  # noqa: BLE001 - the last frame of the program: said once, as an exit code and a message
        display.close()
        _fail(str(error) or repr(error), 2 if isinstance(error, ValueError) else 1)
    display.close()
    match result:
        case Manifest(run_uri=run, directory=directory):
            display.console.print(f"Result: {run}/{directory}", soft_wrap=True, markup=False)
        case object(report_uri=report, checkpoint_uri=checkpoint):
            display.console.print(f"Report: {report}\nCheckpoint: {checkpoint}", soft_wrap=True, markup=False)


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"jumbo: {message}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
