"""`jumbo chaos`: train once in quiet and once under faults, and hold the one against the other."""

import shutil
import sys
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from flows.presets import preset
from flows.temporary_server import start_server
from infra.chaos.plan import DESCRIPTIONS, LOCAL_KINDS, S3_KINDS, Kind
from infra.chaos.s3_server import find_server
from tasks.chaos import ChaosFailure, Fault
from tasks.chaos_experiment import FAULT_SECONDS, Experiment, Outcome

_PLAIN: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}

# Made-up prose repeats itself too often for Gopher's rules. The gate of scaling measures, and lets everything pass.
_TINY: dict[str, Any] = {
    "data": {"validation_fraction": 0.1, "test_fraction": 0.1, "filters": {"gopher": {"enabled": False}}},
    "tokenizer": {"vocab_size": 500, "max_tokens_per_byte": 0.8},
    "tokens": {"max_epochs": 100_000},
    "model": {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 64, "dropout": 0.1},
    "training": {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "ramp_start_batch_size": 8,
        "ramp_tokens": 0,
        "decay_tokens": 1_000_000,
        "validate_every_steps": 100,
        "validation_sequences": 8,
    },
    "cluster": {
        "nodes": 2,
        "ranks_per_node": 1,
        "lease_seconds": 10,  # what lives on after the flow must not have ended the run when the next flow comes
        "start_timeout_seconds": 120,
        "stall_timeout_seconds": 20,
        "collective_timeout_seconds": 15,
    },
    "scaling": {
        "all_reduce_mib": [1],
        "warmup_steps": 3,
        "timed_steps": 10,
        "short_run_steps": 2,
        "min_efficiency": 0,
        "min_tokens_per_second": 0,
        "min_all_reduce_gb_per_second": 0,
    },
    "evaluation": {"multiple_choice": [], "max_test_bytes": 1024, "sample_tokens": 1, "prompts": ["The"]},
}


def check_chaos(run_uri: str, storage: Literal["file", "s3"], names: str) -> tuple[Path, list[Kind]]:
    """The directory, and the faults to inject.

    Raises:
        ValueError: the directory cannot be used, a fault cannot be injected into such a run, or there is no S3 server.
    """
    kinds = [*LOCAL_KINDS, *(S3_KINDS if storage == "s3" else ())]
    if names:
        if unknown := [name for name in names.split(",") if name not in list(Kind)]:
            raise ValueError(f"kinds: {unknown[0]!r} is unknown; there are {', '.join(Kind)}")
        wanted = list(dict.fromkeys(Kind(name) for name in names.split(",")))
        if impossible := [kind for kind in wanted if kind not in kinds]:
            raise ValueError(f"kinds: {impossible[0]} needs --storage s3")
        kinds = wanted
    if storage == "s3":
        find_server()
    if "://" in run_uri:
        raise ValueError(f"run_uri ({run_uri}) must be a directory of this machine; --storage s3 brings its S3 server")
    directory = Path(run_uri or f"runs/chaos-{time.strftime('%Y%m%d-%H%M%S')}").expanduser().resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"run_uri ({run_uri}) must be a new or an empty directory")
    return directory, kinds


def chaos(
    directory: Path, kinds: list[Kind], minutes: float, seed: int, storage: Literal["file", "s3"], keep: bool
) -> None:
    """Raises SystemExit with 1 where the run under faults is not the quiet one, and keeps its directory then."""
    console = Console()
    directory.mkdir(parents=True, exist_ok=True)
    start_server()()  # one for all attempts: a run's own takes seconds to start
    config = preset("laptop", _TINY, {"seed": seed})
    faults = max(len(kinds), int(60 * minutes / FAULT_SECONDS))
    try:
        experiment = Experiment(config, directory, lambda line: console.print(line, **_PLAIN))
        console.print(f"In quiet: {directory}/quiet", **_PLAIN)
        experiment.run_quietly(faults)
        console.print(f"Under faults, for {minutes:g} minutes, seed {seed}: {directory}/attempts", **_PLAIN)
        outcome = experiment.run_disturbed(kinds, faults, 60 * minutes, storage)
    except ChaosFailure as failure:
        sys.stderr.write(f"jumbo: {failure}; see {directory}\n")
        raise SystemExit(1) from None
    console.print(_table(outcome))
    if outcome.differences:
        console.print("DIFFERENT from the quiet run:", *outcome.differences, sep="\n  ", **_PLAIN)
        console.print(f"Kept: {directory} (logs by attempt in attempts/)", **_PLAIN)
        raise SystemExit(1)
    console.print("EQUAL to the quiet run: every step's loss, every tensor of weights and optimizer state", **_PLAIN)
    console.print(f"SHA-256 of them: {outcome.hash}", **_PLAIN)
    if not keep:
        shutil.rmtree(directory)


def _table(outcome: Outcome) -> Table:
    table = Table("fault", "", "injected", "what was seen", title="Faults", title_justify="left")
    by_kind: dict[Kind, list[Fault]] = {}
    for fault in outcome.faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    for kind in Kind:
        if kind in by_kind:
            table.add_row(kind, DESCRIPTIONS[kind], str(len(by_kind[kind])), _seen(by_kind[kind]))
        elif kind in outcome.not_injected:
            table.add_row(kind, DESCRIPTIONS[kind], "-", f"[yellow]not injected:[/] {outcome.not_injected[kind]}")
    table.add_section()
    table.add_row("all", "", str(len(outcome.faults)), _seen(outcome.faults))
    return table


def _seen(faults: list[Fault]) -> str:
    counts = {
        "restarts": sum(fault.restarts for fault in faults),
        "runs of the command": sum(fault.flow_runs for fault in faults),
        "steps lost": sum(fault.lost_steps for fault in faults),
        "checkpoints skipped": sum(fault.skipped for fault in faults),
        "failed saves": sum(fault.failed_saves for fault in faults),
    }
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count) or "nothing"
