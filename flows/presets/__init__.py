"""Named configurations: laptop, j1-large, j1-grande, j1-jumbo. Each is a YAML file of PipelineConfig's fields."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from tasks.config import PipelineConfig

_FOLDER = Path(__file__).parent


def preset_names() -> list[str]:
    """The names that `preset` knows."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def preset(name: str, *layers: Mapping[str, Any]) -> PipelineConfig:
    """The preset's configuration with `layers` over it, the last one strongest; sections are merged field by field.

    >>> preset("laptop", {"run_uri": "runs/mine", "training": {"steps": 50}}).training.steps
    50

    Raises:
        ValueError: an unknown preset, or a field that is unknown or out of bounds, with its name, value and rule.
    """
    if name not in preset_names():
        raise ValueError(f"preset {name!r} is unknown; the presets are {', '.join(preset_names())}")
    return configuration(yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")), *layers)


def configuration(*layers: Mapping[str, Any]) -> PipelineConfig:
    """The layers merged field by field, the last one strongest.

    Raises:
        ValueError: a field that is unknown or out of bounds, with its name, value and rule.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = _merge(merged, layer)
    try:
        return PipelineConfig.model_validate(merged)
    except ValidationError as error:
        raise ValueError(describe(error, PipelineConfig)) from None


def describe(error: ValidationError, section: type[BaseModel]) -> str:
    """What is wrong with a value of the section, as one line: field, rule and value of each fault."""
    return "; ".join(_fault(fault, section) for fault in error.errors())


def _fault(fault: Any, section: type[BaseModel]) -> str:
    field = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{field}: unknown field ({_hint(fault['loc'], section)})"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{field}: {message}" if field else message
    if not message.startswith("Input should be "):
        return f"{field}: {message[0].lower()}{message[1:]}"
    return f"{field}: must be {message.removeprefix('Input should be ')}, not {fault['input']!r}"


def _hint(location: Sequence[str | int], section: type[BaseModel]) -> str:
    """What may have been meant by an unknown field: one beside it, or of its name elsewhere, or what there is."""
    *path, name = location
    here: Any = section
    for part in path:  # an index leads to what a tuple holds
        here = get_args(here)[0] if isinstance(part, int) else here.model_fields[part].annotation
    near = get_close_matches(str(name).lower().replace("-", "_"), here.model_fields, n=1)
    near = near or [field for field in _field_paths(section) if field.endswith(f".{name}")]
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(here.model_fields)}"


def _field_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _field_paths(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged
