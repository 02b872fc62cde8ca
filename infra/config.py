"""Machines: the configuration section that the infra package owns."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
    stall_timeout_seconds: int = Field(600, ge=10, description="Longest silence of the ranks before the job is failed.")
    max_restarts: int = Field(2, ge=0, le=100, description="Times that a job whose ranks were killed is started again.")
