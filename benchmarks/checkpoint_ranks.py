"""Jumbo's side of checkpoint.py: saves and loads on two ranks as peers/checkpoint_driver.py does.

checkpoint_ranks.py jumbo URI MEGABYTES STORE RANK
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from infra.storage import open_storage
from model.checkpoint import Checkpointer

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from checkpoint_driver import State, main


class Jumbo:
    """Two saves in the background; the second has the first one's buffers, as all later ones of a run have."""

    def __init__(self, _: str, uri: str) -> None:
        self.uri = uri
        self.group = dist.new_group(backend="gloo")
        self.checkpointer: Checkpointer | None = self.make()

    def make(self) -> Checkpointer:
        return Checkpointer(open_storage(self.uri), 1, self.group)

    def saves(self) -> list[Callable[[State], Callable[[], object]]]:
        def save(step: int) -> Callable[[State], Callable[[], object]]:
            def begin(state: State) -> Callable[[], object]:
                assert self.checkpointer
                self.checkpointer.save(step, state, {})
                return self.checkpointer.wait

            return begin

        return [save(1), save(2)]

    def end(self) -> None:
        self.checkpointer = None  # with the copy of the state

    def load(self, state: State) -> None:
        self.make().load_latest(state, {}, required=True)


if __name__ == "__main__":
    main(Jumbo)
