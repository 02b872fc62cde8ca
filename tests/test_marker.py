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

from model.checkpoint import Marker


def test_the_marker_names_every_file_with_size_and_checksum(tmp_path: Path) -> None:
    run(save, 2, tmp_path, [10])
    directory = tmp_path / "checkpoints" / "step-00000010"
    marker = json.loads((directory / "complete.json").read_text())
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in directory.iterdir()
        if path.name != "complete.json"
    }
    assert sorted(files) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert marker == {"format_version": 1, "step": 10, "identity": IDENTITY, "files": files}


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10])
    directory = tmp_path / "checkpoints" / "step-00000010"
    evil = pickle.dumps(print)
    (directory / ".metadata").write_bytes(evil)
    marker = json.loads((directory / "complete.json").read_text())
    marker["files"][".metadata"] = {"size_bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
    (directory / "complete.json").write_text(json.dumps(marker))
    with pytest.raises(RuntimeError, match=r"builtins\.print, which does not belong in a checkpoint"):
        run(load, 1, tmp_path)


def test_a_format_of_the_future_is_not_guessed_at(tmp_path: Path) -> None:
    run(save, 1, tmp_path, [10])
    path = tmp_path / "checkpoints" / "step-00000010" / "complete.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    with pytest.raises(RuntimeError, match=r"format_version \(2\) must be 1"):
        run(load, 1, tmp_path)


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
        (lambda marker: None, "content: "),
        (lambda marker: [marker], "content: "),
        (set_to("identity", None), "identity: "),
        (set_to("identity", [["n_layer", 2]]), "identity: "),
        (without("identity"), "identity: "),
        (without("step"), "step: "),
        (without("files"), "files: "),
        (without("format_version"), "format_version: "),
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
def test_a_malformed_marker_is_damage(tmp_path: Path, change: Callable[[dict[str, Any]], Any], reason: str) -> None:
    file = {"size_bytes": 1, "sha256": "0" * 64}
    marker = {"format_version": 1, "step": 20, "identity": IDENTITY, "files": {".metadata": file, "__0_0.distcp": file}}
    path = tmp_path / "complete.json"
    path.write_text(json.dumps(marker))
    assert Marker.read(path, 20).identity == IDENTITY
    path.write_text(json.dumps(change(marker)))
    with pytest.raises(ValueError, match="complete.json is damaged: " + re.escape(reason)):
        Marker.read(path, 20)


@pytest.mark.parametrize("change", [set_to("identity", None), name_file("../x"), set_to("step", 10)])
def test_behind_a_malformed_marker_every_rank_loads_the_one_before(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    run(save, 2, tmp_path, [10, 20])
    path = tmp_path / "checkpoints" / "step-00000020" / "complete.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    (step, content, (warning,)), (other_step, other_content, _) = run(load, 2, tmp_path)
    assert (step, content) == (other_step, other_content) == (10, values(10))
    assert "skipped step-00000020: rank 0: ValueError: complete.json is damaged" in warning
