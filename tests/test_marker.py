import contextlib
import hashlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import IDENTITY, load, save, values
from ranks import run

from model.checkpoint_marker import Marker, SavedFile

FILE = SavedFile(size_bytes=1, sha256="0" * 64)
MARKER = Marker(step=20, identity=IDENTITY, files={".metadata": FILE, "__0_0.distcp": FILE}, format_version=2)


def test_the_marker_names_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    run(save, 2, tmp_path, [10])
    directory = tmp_path / "checkpoints" / "step-00000010"
    marker = json.loads((directory / "complete.json").read_text())
    sha256 = marker.pop("sha256")
    assert sha256 == hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in directory.iterdir()
        if path.name != "complete.json"
    }
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert marker == {"format_version": 2, "step": 10, "identity": IDENTITY, "files": files}


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10])
    directory = tmp_path / "checkpoints" / "step-00000010"
    evil = pickle.dumps(print)
    (directory / ".metadata").write_bytes(evil)
    saved = {"size_bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
    edit(directory / "complete.json", lambda marker: marker | {"files": marker["files"] | {".metadata": saved}})
    with pytest.raises(RuntimeError, match=r"builtins\.print, which does not belong in a checkpoint"):
        run(load, 1, tmp_path)


def test_a_format_of_the_future_is_not_guessed_at(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10])
    edit(tmp_path / "checkpoints" / "step-00000010" / "complete.json", set_to("format_version", 3))
    with pytest.raises(RuntimeError, match=r"format_version \(3\) must be 2"):
        run(load, 1, tmp_path)


def sealed(content: Any) -> bytes:
    """A marker's JSON with its checksum, where it has none yet."""
    if isinstance(content, dict) and "sha256" not in content:
        sha256 = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        content = content | {"sha256": sha256}
    return json.dumps(content).encode()


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a stored marker as somebody would who knows of its checksum."""
    path.write_bytes(sealed(change(without("sha256")(json.loads(path.read_text())))))


def without(*keys: str) -> Callable[[dict[str, Any]], Any]:
    return lambda marker: {key: value for key, value in marker.items() if key not in keys}


def set_to(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda marker: marker | {key: value}


def name_file(name: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(marker: dict[str, Any]) -> Any:
        return marker | {"files": marker["files"] | {name: marker["files"]["__0_0.distcp"] | changes}}

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda marker: None, "it is no JSON object"),
        (lambda marker: [marker], "it is no JSON object"),
        (lambda marker: marker | {"sha256": "0" * 64}, "its SHA-256 is not what was saved"),
        (set_to("identity", None), "identity: "),
        (set_to("identity", [["n_layer", 2]]), "identity: "),
        (without("identity"), "identity: "),
        (without("step"), "step: "),
        (without("files"), "files: "),
        (set_to("step", "20"), "step: "),
        (set_to("step", 10), "it is of step 10"),
        (set_to("files", ["__0_0.distcp"]), "files: "),
        (set_to("files", {"__0_0.distcp": None}), "files.__0_0.distcp: "),
        (set_to("extra", 1), "extra: "),
        (name_file("../x"), "files.../x."),
        (name_file("/tmp/x"), "files./tmp/x."),
        (name_file("a/b"), "files.a/b."),
        (name_file(".."), "files..."),
        (name_file(""), "files.."),
        (name_file("__0_0.distcp", size_bytes=-1), "files.__0_0.distcp.size_bytes: "),
        (name_file("__0_0.distcp", sha256=None), "files.__0_0.distcp.sha256: "),
    ],
)
def test_a_malformed_marker_is_damage(change: Callable[[dict[str, Any]], Any], reason: str) -> None:
    marker = MARKER.model_dump()
    assert Marker.decode(sealed(marker), 20).identity == IDENTITY
    with pytest.raises(ValueError, match="complete.json is damaged: " + re.escape(reason)):
        Marker.decode(sealed(change(marker)), 20)


def test_no_flipped_bit_passes() -> None:  # case C4
    """Nothing that it says can change unnoticed, the identity least of all: it would be taken for another run's."""
    whole = MARKER.encode()
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            with contextlib.suppress(ValueError):
                assert Marker.decode(bytes(damaged), 20) == MARKER  # a blank may become another


def test_an_identity_comes_back_as_json_has_it() -> None:
    marker = MARKER.model_copy(update={"identity": {"weights": {10: 0.1, 9: float("inf")}, "betas": (0.9, 0.95)}})
    assert Marker.decode(marker.encode(), 20).identity == {
        "weights": {"10": 0.1, "9": float("inf")},
        "betas": [0.9, 0.95],
    }


@pytest.mark.parametrize("change", [set_to("identity", None), name_file("../x"), set_to("step", 10)])
def test_behind_a_malformed_marker_every_rank_loads_the_one_before(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    run(save, 2, tmp_path, [10, 20])
    edit(tmp_path / "checkpoints" / "step-00000020" / "complete.json", change)
    (step, content, (warning,)), (other_step, other_content, _) = run(load, 2, tmp_path)
    assert (step, content) == (other_step, other_content) == (10, values(10))
    assert "skipped step-00000020: rank 0: ValueError: complete.json is damaged" in warning
