"""Plain training loops, as their users write them, on the work of training.py; runs in the peer's own environment.

    python training_driver.py SIDE JOB    SIDE: "hugging face" or "nanogpt"; JOB: the fields of Job, as JSON

Then each line of standard input is work, and answered by one of JSON: `train N` takes N optimizer steps and gives the
seconds of each; `score` gives the mean loss of the held-out sequences.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Job:
    """What every side trains, on what, and how.

    Attributes:
        precision: "fp32"; "bf16", which is computed in beside weights in fp32; or "pure bf16", weights and all.
        sequences: An .npy file of token ids, (sequences, seq_len + 1).
        held_out: So many of its last sequences are for `score`.
        weights: A file of Jumbo's initial parameters, which Hugging Face's model begins from; empty for its own.
        batch_size, micro_batch_size: Sequences of a step, and of a forward pass.
    """

    n_layer: int
    n_head: int
    d_model: int
    seq_len: int
    vocab_size: int
    precision: str
    sequences: str
    held_out: int
    weights: str = ""
    batch_size: int = 16
    micro_batch_size: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    seed: int = 0
    threads: int = 2

    def rate(self, step: int) -> float:
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps)

    def training_batches(self) -> Iterator[Batches]:
        """Yields the micro-batches of inputs and targets of each step, in an order that the seed gives; endless."""
        sequences = np.load(self.sequences)
        chance = np.random.default_rng(self.seed)
        while True:
            order = chance.permutation(len(sequences) - self.held_out)
            for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
                yield self._cut(sequences[order[start : start + self.batch_size]])

    def held_out_batches(self) -> Batches:
        return self._cut(np.load(self.sequences)[-self.held_out :])

    def _cut(self, sequences: np.ndarray) -> Batches:
        parts = torch.from_numpy(sequences.astype(np.int64)).split(self.micro_batch_size)
        return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in parts]


def serve(job: Job, train: Callable[[int, Batches], None], score: Callable[[Batches], float]) -> None:
    """Answers standard input until it ends.

    Args:
        train: Takes the step of this number.
        score: The mean loss per token.
    """
    steps = enumerate(job.training_batches())
    for line in sys.stdin:
        verb, *numbers = line.split()
        if verb == "train":
            answer: object = [_timed(train, *next(steps)) for _ in range(int(numbers[0]))]
        else:
            answer = score(job.held_out_batches())
        print(json.dumps(answer), flush=True)


def _timed(train: Callable[[int, Batches], None], step: int, batches: Batches) -> float:
    started = time.perf_counter()
    train(step, batches)
    return time.perf_counter() - started


class PlainLoop:
    """Gradients are accumulated over the micro-batches, clipped, and given to AdamW, which is fused as in transformers'
    own Trainer and in nanoGPT. Matrices are decayed, as both do.

    Args:
        loss: Of inputs and targets.
    """

    def __init__(self, job: Job, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.job = job
        self.device = next(model.parameters()).device
        self.loss = loss
        self.model = model.to(torch.bfloat16) if job.precision == "pure bf16" else model
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": job.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, job.learning_rate, job.betas, fused=True)

    def train(self, step: int, batches: Batches) -> None:
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.rate(step)
        for inputs, targets in batches:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.precision == "bf16"):
                loss = self.loss(inputs.to(self.device), targets.to(self.device)) / len(batches)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def hugging_face(job: Job) -> tuple[PlainLoop, Callable[[Tensor, Tensor], Tensor]]:
    """Returns the loop, and the loss that is held against others': in training the labels are the inputs, as its users
    give them, so that the last token of a sequence predicts nothing."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=job.vocab_size,
        n_positions=job.seq_len,
        n_embd=job.d_model,
        n_layer=job.n_layer,
        n_head=job.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    if job.weights:
        model.load_state_dict(as_gpt2(torch.load(job.weights), job))
    loop = PlainLoop(job, model, lambda inputs, targets: model(input_ids=inputs, labels=inputs).loss)
    return loop, lambda inputs, targets: F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())


def as_gpt2(weights: dict[str, Tensor], job: Job) -> dict[str, Tensor]:
    """Jumbo's parameters under GPT-2's names. Its matrices stand the other way round, and the rows of its `qkv` go by
    heads, where GPT-2 has all queries first."""
    embedding = weights["token_embedding.weight"]
    named = {
        "transformer.wte.weight": embedding,
        "lm_head.weight": embedding,
        "transformer.wpe.weight": weights["position_embedding.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
    }
    parts = {
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.output",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.expand",
        "mlp.c_proj": "mlp.output",
    }
    for layer in range(job.n_layer):
        for theirs, ours in parts.items():
            for kind in ("weight", "bias"):
                values = weights[f"layers.{layer}.{ours}.{kind}"]
                if ours == "attention.qkv":
                    values = values.unflatten(0, (job.n_head, 3, -1)).transpose(0, 1).flatten(0, 2)
                named[f"transformer.h.{layer}.{theirs}.{kind}"] = values.t() if values.ndim == 2 else values
    return named


def nanogpt(job: Job) -> tuple[PlainLoop, Callable[[Tensor, Tensor], Tensor]]:
    from nanogpt import NanoGPT  # beside this file

    model = NanoGPT(job.n_layer, job.n_head, job.d_model, job.seq_len, job.vocab_size)
    return PlainLoop(job, model, model), model


@torch.no_grad()
def mean_loss(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batches: Batches) -> float:
    model.eval()
    tokens = sum(targets.numel() for _, targets in batches)
    return sum(loss(inputs, targets).item() * targets.numel() for inputs, targets in batches) / tokens


def main(side: str, job: Job) -> None:
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)
    loop, loss = {"hugging face": hugging_face, "nanogpt": nanogpt}[side](job)
    serve(job, loop.train, partial(mean_loss, loop.model, loss))


if __name__ == "__main__":
    main(sys.argv[1], Job(**json.loads(sys.argv[2])))
