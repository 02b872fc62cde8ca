"""The command line, `jumbo`: every command takes the flow's own configuration, over a preset and the environment."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from importlib import import_module
from typing import Any, NoReturn, get_origin

# Prefect's console lines give way to one line a stage; errors are printed once, by main().
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsConfigDict, SettingsError

from flows.command_line import Chaos, HelpFormatter, InspectDocuments, InspectTokens, Jumbo, explain
from flows.interruption import end_interrupted, listen, one_interrupt
from flows.presets import configuration, describe, preset
from infra.errors import Preempted
from tasks.config import PipelineConfig

_FLOWS = {
    "pretrain": "pretrain",
    "prepare": "preparation",
    "validate_scaling": "scaling_validation",
    "score": "scoring",
    "janitor": "janitor",
}
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


def main(arguments: list[str] | None = None) -> None:
    """Run one command. Exit code 2: the input is wrong, nothing ran; 1: the run failed; 130, 143, 129: interrupted by
    Ctrl-C, SIGTERM, SIGHUP."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with one_interrupt():
        try:
            _find_command(arguments or ["--help"])()
        except KeyboardInterrupt as interrupt:
            end_interrupted(interrupt)


def _find_command(arguments: list[str]) -> Callable[[], None]:
    """What is left to run once the input has been found good."""
    try:
        return _prepare_command(*_parse(arguments))
    except (ValueError, OSError) as error:
        _fail(str(error).replace("\n", "\\n"), 2)  # one line, whatever a file is called


def _parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and the options that were given, as nested fields; values are still text."""
    try:
        source = CliSettingsSource[Any](
            Jumbo, cli_parse_args=arguments, cli_exit_on_error=False, formatter_class=HelpFormatter
        )
        given = source()
    except SettingsError as error:
        raise ValueError(explain(str(error), arguments)) from None
    command = next(name for name in Jumbo.model_fields if isinstance(given.get(name), dict))
    options = {key: value for key, value in given[command].items() if value is not None}
    if command in ("inspect", "chaos"):
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


def _prepare_command(command: str, options: dict[str, Any]) -> Callable[[], None]:
    """What is left to run once the input has been found good.

    Raises:
        ValueError: the input is wrong.
    """
    if command == "doctor":
        from flows.doctor import doctor

        return doctor
    if command == "janitor":
        return lambda: _run(command)
    if command == "inspect":
        return _inspection(options)
    if command == "chaos":
        return _chaos(options)
    step = options.pop("step", None)
    config = _configuration(options.pop("preset", None), _environment(), options)
    from tasks.preflight import check_run, check_scoring

    if command == "score":
        if step is not None and not str(step).isdecimal():
            raise ValueError(f"step: must be a whole number, not {step!r}")
        check_scoring(config, step := None if step is None else int(step))
        return lambda: _run(command, config, step)
    check_run(config, needs_cluster=command != "prepare")
    return lambda: _run(command, config)


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
        raise ValueError(describe(error, section)) from None
    if kind == "documents":
        documents = see_documents(**wanted)
        return lambda: show_documents(documents)
    tokens = see_tokens(**wanted)
    return lambda: show_tokens(tokens)


def _chaos(options: dict[str, Any]) -> Callable[[], None]:
    """What is left is the experiment."""
    from flows.chaos import chaos, check_chaos

    try:
        wanted = Chaos.model_validate(options)
    except ValidationError as error:
        raise ValueError(describe(error, Chaos)) from None
    directory, kinds = check_chaos(wanted.run_uri, wanted.storage, wanted.kinds)
    return lambda: chaos(directory, kinds, wanted.minutes, wanted.seed, wanted.storage, keep=bool(wanted.run_uri))


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


def _run(command: str, *parameters: Any) -> None:
    """Run a flow with its stages drawn in the terminal."""
    from flows.console import show_stages
    from flows.temporary_server import start_server
    from tasks.manifest import Manifest

    try:
        await_server = start_server()  # takes seconds, in which the flow is imported
        flow = getattr(import_module(f"flows.{_FLOWS[command]}"), _FLOWS[command])
        with closing(show_stages()) as display:
            await_server()
            result = flow.with_options(on_running=[listen])(*parameters)
    except Preempted as preempted:
        _fail(str(preempted), os.EX_TEMPFAIL)
    except Exception as error:  # noqa: BLE001 - the last frame of the program: said once, as an exit code and a message
        _fail(str(error) or repr(error), 2 if isinstance(error, ValueError) else 1)
    match result:
        case Manifest(run_uri=run, directory=directory):
            display.console.print(f"Result: {run}/{directory}", soft_wrap=True, markup=False)
        case object(report_uri=report, checkpoint_uri=checkpoint):
            display.console.print(f"Report: {report}\nCheckpoint: {checkpoint}", soft_wrap=True, markup=False)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"jumbo: {message}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
