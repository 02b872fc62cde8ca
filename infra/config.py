"""Machines: the configuration section that the infra package owns."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ClusterConfig(BaseModel):
    """The machines that scaling validation, training and evaluation run on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    provider: Literal["local", "ec2"] = Field(
        "local", description="'local' simulates the nodes as processes on this machine; 'ec2' allocates instances."
    )
    nodes: int = Field(1, ge=1, le=4096, description="Machines.")
    ranks_per_node: int = Field(2, ge=1, le=64, description="Training processes a machine; on GPUs, one per GPU.")
    threads_per_rank: int = Field(1, ge=1, le=256, description="CPU threads of one rank.")
    instance_type: str = Field("p4d.24xlarge", description="EC2 instance type; unused by 'local'.")
    lease_seconds: int = Field(
        60, ge=5, le=3600, description="A cluster whose owner has not renewed its lease for this long ends itself."
    )
    start_timeout_seconds: int = Field(300, ge=10, description="Longest time until the ranks report their first sign.")
    stall_timeout_seconds: int = Field(
        600,
        ge=10,
        description="Longest silence of all ranks; and longest wait of one for another until the first step is over.",
    )
    collective_timeout_seconds: int = Field(
        120, ge=5, description="Longest wait of a rank for another in a step, once the first step is over."
    )
    stop_seconds: int = Field(
        10, ge=5, le=600, description="Time that ranks have, once asked to stop, to end their step and save it."
    )
    max_restarts: int = Field(
        2, ge=0, le=100, description="Times that a job is started again after ranks were killed, stuck or preempted."
    )

    @model_validator(mode="after")
    def _waits_are_shorter_than_silence(self) -> Self:
        if self.collective_timeout_seconds > self.stall_timeout_seconds:
            raise ValueError(
                f"collective_timeout_seconds ({self.collective_timeout_seconds}) must not exceed "
                f"stall_timeout_seconds ({self.stall_timeout_seconds})"
            )
        return self
