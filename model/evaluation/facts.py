"""What a report is made of: one plain dict, as it can be read from a run directory's manifests.

Every part may be missing, as after `jumbo score` or when a gate has stopped the run; the report leaves it out.
"""

from typing import Any, NotRequired, TypedDict


class Run(TypedDict, total=False):
    uri: str
    preset: str
    created: str
    """When the run began, in ISO 8601."""
    seconds: float
    """Of all stages together."""
    cost_usd: float
    parameters: int
    commit: str


class Stage(TypedDict):
    name: str
    outcome: str
    """completed, cached, skipped, failed, ... as the orchestrator calls it."""
    seconds: NotRequired[float]
    cost_usd: NotRequired[float]


class Source(TypedDict, total=False):
    """What became of one source's documents."""

    files: int
    read: int
    read_bytes: int
    kept: int
    kept_bytes: int
    dropped: dict[str, int]
    """Reason -> documents."""
    damaged: list[str]
    """Files that could only be read in part."""
    would_drop: dict[str, int]
    """Rule of the filters -> documents that break it first, dropped or not."""
    encodings: dict[str, int]
    languages: dict[str, int]
    """Of the documents kept."""


class Split(TypedDict, total=False):
    documents: int
    tokens: int
    bytes: int


class Funnel(TypedDict, total=False):
    sources: dict[str, Source]
    splits: dict[str, Split]
    histograms: dict[str, Any]
    """Of each score that the filters judge; see model.data.filtering.filters.Histograms."""
    contamination: dict[str, Any]
    """Evaluation file -> what of it was found in the text; see model.data.filtering.decontamination.FileHits."""


class Tokenizer(TypedDict, total=False):
    vocab_size: int
    tokens_per_byte: float
    encoded_mb_per_second: float
    """Of text, by one process, a document at a time."""
    multi_word_pieces: int
    multi_word_piece_share: float
    """Of the vocabulary."""
    multi_word_token_share: float
    """Of the tokens of real text."""
    entity_pieces: int
    """Multi-word pieces that look like names."""
    entity_piece_share: float
    undertrained_pieces: int | None
    """Those that the text which the vocabulary was chosen on never uses; None if unknown."""
    examples: list[str]
    """Multi-word pieces; a word boundary is a space or SentencePiece's U+2581."""
    entity_examples: list[str]
    tokens_per_byte_by_source: dict[str, float]
    tokens_per_word_by_language: dict[str, float]


class Check(TypedDict):
    """One threshold of the scaling gate."""

    name: str
    measured: float
    relation: NotRequired[str]
    """How the measured value must stand to the bound: ≥, ≤ or <."""
    bound: float
    unit: str
    passed: bool
    explanation: NotRequired[str]


class AllReduce(TypedDict):
    mib: float
    gb_per_second: float


class Scaling(TypedDict, total=False):
    checks: list[Check]
    all_reduce: list[AllReduce]
    ranks: int
    copies: int
    tokens_per_second_one_copy: float
    tokens_per_second_all_ranks: float
    efficiency: float
    """tokens_per_second_all_ranks / (copies * tokens_per_second_one_copy)."""


class TrainingLine(TypedDict):
    """One optimizer step: a line of metrics/train.jsonl."""

    step: int
    loss: float | None
    """Nats per token; None where it was no number, and the step was skipped."""
    validation_loss: NotRequired[float]
    learning_rate: NotRequired[float]
    tokens: NotRequired[int]
    """Of the run, up to this step."""
    tokens_per_second: NotRequired[float]
    gradient_norm: NotRequired[float | None]
    batch_size: NotRequired[int]
    mfu: NotRequired[float]
    """Not there where the device's peak is unknown."""
    step_seconds: NotRequired[float]
    loader_seconds: NotRequired[float]
    checkpoint_blocked_seconds: NotRequired[float]
    skipped_steps: NotRequired[int]
    """Of the run, up to this step."""
    slow_ranks: NotRequired[list[int]]


class Goodput(TypedDict):
    """See model.goodput.Goodput."""

    useful_seconds: float
    wall_seconds: float
    restarts: int
    lost_steps: int


class DocumentsResult(TypedDict):
    bits_per_byte: float
    log_probability_per_byte: float
    tokens: int
    bytes: int
    documents: int
    baselines: dict[str, float]
    """Name -> bits per byte of the same text."""


class ChoiceResult(TypedDict):
    normalization: str
    accuracy: float
    standard_error: float
    chance: float
    rows: int
    candidates: int
    unaligned: int
    accuracies: dict[str, float]
    """Normalisation -> accuracy."""


class Sample(TypedDict):
    prompt: str
    text: str
    """The continuation alone."""


class Evaluation(TypedDict, total=False):
    """evaluation/report.json."""

    documents: dict[str, DocumentsResult]
    multiple_choice: dict[str, ChoiceResult]
    samples: list[Sample]


class Facts(TypedDict, total=False):
    run: Run
    configuration: dict[str, Any]
    stages: list[Stage]
    funnel: Funnel
    tokenizer: Tokenizer
    tokens: dict[str, Split]
    scaling: Scaling
    training: list[TrainingLine]
    goodput: Goodput | None
    evaluation: Evaluation
