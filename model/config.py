"""What is learned and how: the configuration sections of the model, its training and its evaluation."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """A frozen part of the configuration; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(Section):
    """The shape of the GPT; its vocabulary is the tokenizer's."""

    n_layer: int = Field(4, ge=1, description="Transformer blocks.")
    n_head: int = Field(4, ge=1, description="Attention heads.")
    d_model: int = Field(256, ge=8, description="Width of the residual stream.")
    seq_len: int = Field(256, ge=8, description="Context length in tokens.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on attention and residual branches in training.")

    isolate_documents: bool = Field(
        False, description="Let no token see another document that is packed into the same sequence."
    )

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.d_model % self.n_head:
            raise ValueError(f"d_model ({self.d_model}) must be divisible by n_head ({self.n_head})")
        return self


class TrainingConfig(Section):
    """How the model is trained. Defaults follow Brown et al. 2020, as Jurassic-1 did, where scale does not matter."""

    steps: int = Field(300, ge=1, description="Optimizer steps of the whole run.")
    global_batch_size: int = Field(16, ge=1, description="Sequences in one step, over all ranks.")
    micro_batch_size: int = Field(8, ge=1, description="Sequences in one forward pass of one rank.")
    ramp_start_batch_size: int = Field(
        16, ge=1, description="Sequences a step at the start; grows linearly to global_batch_size."
    )
    ramp_tokens: int = Field(0, ge=0, description="Tokens over which the batch size grows; 0 means no ramp.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="Peak learning rate.")
    min_learning_rate_fraction: float = Field(0.1, ge=0, le=1, description="Last learning rate as a share of the peak.")
    warmup_tokens: int = Field(0, ge=0, description="Tokens of linear warm-up.")
    decay_tokens: int | None = Field(
        None, ge=1, description="Tokens of warm-up and cosine decay together; empty means all tokens of the run."
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay of matrices; none on biases and norms.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay rate of the gradient's mean.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Adam's decay rate of the squared gradient's mean.")
    epsilon: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    clip_norm: float = Field(1.0, gt=0, description="Largest global gradient norm.")
    spike_sigmas: float = Field(
        6.0, gt=0, description="A step whose loss or gradient norm is so many deviations above the mean is skipped."
    )
    spike_window_steps: int = Field(128, ge=2, le=65_536, description="Steps that the mean and deviation are of.")
    max_nonfinite_steps: int = Field(
        5, ge=0, description="Steps in a row that may be skipped for a loss that is no number; one more stops the run."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="What is computed in; parameters and sums are in fp32. 'auto' is bf16 on GPUs, else fp32."
    )
    checkpoint_every_steps: int = Field(50, ge=1, description="Steps between checkpoints; the last step has one too.")
    keep_checkpoints: int = Field(2, ge=1, description="Complete checkpoints to keep; older ones are deleted.")
    max_failed_saves: int = Field(
        2, ge=0, description="Checkpoints in a row that may fail to be saved; one more, or the last one, stops the run."
    )
    validate_every_steps: int = Field(50, ge=1, description="Steps between validations; the last step has one too.")
    validation_sequences: int = Field(64, ge=1, description="Most validation sequences scored each time.")
    resume: Literal["auto", "required"] = Field(
        "auto", description="'auto' starts at step 0 when no checkpoint was ever completed; 'required' refuses to."
    )

    tensorboard: bool = Field(
        False, description="Write the metrics for TensorBoard too; needs the package: pip install 'jumbo[tensorboard]'."
    )

    @model_validator(mode="after")
    def _ramp_grows(self) -> Self:
        if self.ramp_start_batch_size > self.global_batch_size:
            raise ValueError(
                f"ramp_start_batch_size ({self.ramp_start_batch_size}) must not exceed "
                f"global_batch_size ({self.global_batch_size})"
            )
        if self.decay_tokens is not None and self.decay_tokens <= self.warmup_tokens:
            raise ValueError(
                f"decay_tokens ({self.decay_tokens}) must be greater than warmup_tokens ({self.warmup_tokens})"
            )
        return self


class ScalingConfig(Section):
    """The gate before training: what the cluster must show, measured on it. A threshold of 0 always passes."""

    all_reduce_mib: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        (1, 16), min_length=1, description="All-reduce message sizes, in MiB."
    )
    warmup_steps: int = Field(2, ge=1, description="Untimed steps before a throughput measurement.")
    timed_steps: int = Field(5, ge=1, description="Timed steps of a throughput measurement; their median counts.")
    short_run_steps: int = Field(10, ge=2, description="Steps of the short run of the real model on the whole cluster.")
    min_all_reduce_gb_per_second: float = Field(0.0, ge=0, description="Least bus bandwidth at the largest message.")
    min_tokens_per_second: float = Field(0.0, ge=0, description="Least throughput of the whole cluster.")
    min_efficiency: float = Field(
        0.0, ge=0, le=1, description="Least throughput of all ranks over (ranks x throughput of one rank)."
    )
    max_peak_memory_gib: float = Field(1024.0, gt=0, description="Most memory that one rank may use.")
    max_checkpoint_save_seconds: float = Field(600.0, gt=0, description="Longest time to save a checkpoint.")
    max_checkpoint_load_seconds: float = Field(600.0, gt=0, description="Longest time to load a checkpoint.")


class ChoiceFileConfig(Section):
    """A multiple-choice file, one JSON object a line: {"candidates": [{"context", "completion"}], "target_index"}."""

    name: str = Field(min_length=1, description="Name in the report.")
    uri: str = Field(min_length=1, title="URI", description="Path, file:, s3:// or package: URI of the .jsonl file.")


class EvaluationConfig(Section):
    """How a checkpoint is judged."""

    multiple_choice: tuple[ChoiceFileConfig, ...] = Field((), description="Multiple-choice files.")
    max_test_bytes: int = Field(
        4 << 20, ge=1 << 10, description="Most bytes of held-out test text to score; whole documents, in order."
    )
    batch_size: int = Field(16, ge=1, description="Sequences in one forward pass.")
    prompts: tuple[str, ...] = Field(("The",), description="Prompts for the samples in the report.")
    sample_tokens: int = Field(60, ge=1, description="Tokens to generate for a prompt.")
    temperature: float = Field(0.8, ge=0, le=5, description="Sampling temperature; 0 takes the likeliest token.")
    top_p: float = Field(0.95, gt=0, le=1, description="Sample from the likeliest tokens that hold this probability.")
