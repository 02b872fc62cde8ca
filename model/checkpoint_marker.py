"""`complete.json`: what makes a checkpoint complete. It is stored last, and names every file with its SHA-256."""

import hashlib
import json
from typing import Annotated, Any

from pydantic import Field, ValidationError

from model.config import Section

FORMAT_VERSION = 2
MARKER = "complete.json"


class SavedFile(Section, strict=True):
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Marker(Section, strict=True):
    """The content of `complete.json`.

    `identity` holds what the run is made of, its configuration and seed among it. Learning rate, place in the data and
    dropout masks follow from those and the step, so nothing else of them is kept.
    """

    step: int
    identity: dict[str, Any]
    # Names become parts of paths, so nothing but a plain name will do.
    files: dict[Annotated[str, Field(pattern=r"^\.?\w[\w.-]*$")], SavedFile]
    format_version: int

    def encode(self) -> bytes:
        """Its JSON, with a SHA-256 of its own: what a flipped bit has changed must not pass for another run's."""
        content = json.loads(json.dumps(self.model_dump()))
        return json.dumps(content | {"sha256": _sha256(content)}, indent=1, sort_keys=True).encode()

    @classmethod
    def decode(cls, encoded: bytes, step: int) -> "Marker":
        """The marker of the checkpoint of `step`.

        Raises:
            ValueError: it is damaged, or of another format or step.
        """
        try:
            content = json.loads(encoded)
        except ValueError as error:
            raise ValueError(f"{MARKER} is damaged: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{MARKER} is damaged: it is no JSON object")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"{MARKER}: format_version ({version}) must be {FORMAT_VERSION}")
        sha256 = content.pop("sha256", None)
        if sha256 != _sha256(content):
            raise ValueError(f"{MARKER} is damaged: its SHA-256 is not what was saved")
        try:
            marker = cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{MARKER} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if marker.step != step:
            raise ValueError(f"{MARKER} is damaged: it is of step {marker.step}")
        return marker


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
