"""Jumbo's side of training.py, by the real Learner on one process: train_steps.py JOB; see peers/training_driver.py."""

import json
import sys

import torch
import torch.distributed as dist
from peers.training_driver import Batches, Job, serve

from model.config import ModelConfig, TrainingConfig
from model.learner import Learner
from model.parallel import build_mesh
from model.parallel_plan import ParallelPlan


def main(job: Job) -> None:
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    learner = build_learner(job, "cpu")

    def train(step: int, batches: Batches) -> None:
        learner.step(step, batches, job.rate(step))

    serve(job, train, learner.mean_loss)


def model_config(job: Job) -> ModelConfig:
    return ModelConfig(n_layer=job.n_layer, n_head=job.n_head, d_model=job.d_model, seq_len=job.seq_len)


def build_learner(job: Job, device_type: str, plan: ParallelPlan | None = None) -> Learner:
    training = TrainingConfig(
        global_batch_size=job.batch_size,
        micro_batch_size=job.micro_batch_size,
        ramp_start_batch_size=job.batch_size,
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        beta1=job.betas[0],
        beta2=job.betas[1],
        clip_norm=job.clip_norm,
        precision=job.precision,
    )
    plan = plan or ParallelPlan()
    return Learner(model_config(job), training, job.vocab_size, job.seed, plan, build_mesh(plan, device_type))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
