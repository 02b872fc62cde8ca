"""Whether two runs are one and the same: every tensor of their last checkpoints, every step of their metrics."""

import hashlib
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from infra.storage import Storage, open_storage
from tasks.chaos_watch import METRICS
from tasks.preflight import complete_steps

COMPARED = ("loss", "gradient_norm", "learning_rate", "tokens", "batch_size", "validation_loss", "skipped")
"""What the metrics hold of a step beside times."""


def final_hashes(run_uri: str) -> dict[str, str]:
    """The SHA-256 of every full tensor, weights and optimizer state, in a run's newest complete checkpoint."""
    storage = open_storage(f"{run_uri}/checkpoints")
    directory = f"step-{complete_steps(run_uri)[-1]:08d}"
    with tempfile.TemporaryDirectory() as local:
        for entry in storage.list(directory):
            storage.download(entry.name, Path(local) / Path(entry.name).name)
        state = _load(Path(local))
    return {name: _hash(tensor) for name, tensor in sorted(state.items())}


def _load(directory: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(directory)
    saved = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert state, "a checkpoint without tensors"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as it is told to be
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _hash(tensor: torch.Tensor) -> str:
    text = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(text + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def overall_hash(hashes: dict[str, str]) -> str:
    """One hash for all tensors and their names."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def differences(quiet_uri: str, disturbed_uri: str) -> list[str]:
    """What differs, in lines; empty where the runs are equal."""
    return [
        *tensor_differences(final_hashes(quiet_uri), final_hashes(disturbed_uri)),
        *metric_differences(_steps(open_storage(quiet_uri)), _steps(open_storage(disturbed_uri))),
    ]


def tensor_differences(quiet: dict[str, str], disturbed: dict[str, str]) -> list[str]:
    found = []
    for what, names in (
        ("is missing from", quiet.keys() - disturbed.keys()),
        ("is new in", disturbed.keys() - quiet.keys()),
        ("differs in", {name for name in quiet.keys() & disturbed.keys() if quiet[name] != disturbed[name]}),
    ):
        if names:
            first, *others = sorted(names)
            also = f", and {len(others)} more" if others else ""
            found.append(f"tensor {first} {what} the disturbed run's last checkpoint{also}")
    return found


def metric_differences(quiet: list[dict[str, Any]], disturbed: list[dict[str, Any]]) -> list[str]:
    """The first step at which the metrics part."""
    for before, after in zip(quiet, disturbed, strict=False):
        if before["step"] != after["step"]:
            return [f"{METRICS} has step {after['step']} where step {before['step']} belongs"]
        for name in COMPARED:
            if before.get(name) != after.get(name):
                return [f"{METRICS}, step {before['step']}: {name} is {after.get(name)}, not {before.get(name)}"]
    if len(quiet) != len(disturbed):
        return [f"{METRICS} has {len(disturbed)} steps, not {len(quiet)}"]
    return []


def _steps(run: Storage) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.read(METRICS).splitlines()]
