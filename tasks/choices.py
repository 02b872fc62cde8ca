"""Finds and reads the multiple-choice files of an evaluation."""

from infra.storage import find
from model.config import EvaluationConfig
from model.evaluation.multiple_choice import Row, read_rows


def load_choices(evaluation: EvaluationConfig) -> dict[str, list[Row]]:
    """The rows of every multiple-choice file, by name.

    Raises:
        ValueError: a file is missing, or one of its lines is wrong.
    """
    rows: dict[str, list[Row]] = {}
    for index, choice in enumerate(evaluation.multiple_choice):
        field = f"evaluation.multiple_choice.{index}"
        if choice.name in rows:
            raise ValueError(f"{field}.name: {choice.name!r} stands twice")
        try:
            storage, entries = find(choice.uri)
            if len(entries) != 1:
                raise ValueError(f"{choice.uri!r} finds {len(entries)} files; it must name one")
            with storage.open(entries[0].name) as lines:
                rows[choice.name] = read_rows(lines, choice.uri)
        except (OSError, ValueError) as error:
            raise ValueError(f"{field}.uri: {error}") from error
    return rows
