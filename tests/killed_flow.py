"""A flow that is killed, for the tests of kills: `python -m killed_flow N PRESET_LAYERS_JSON` runs `preparation` and
sends itself SIGKILL just before its N-th change of the run directory."""

import json
import os
import signal
import sys
from itertools import count
from typing import Any

from flows.preparation import preparation
from flows.presets import preset
from infra import storage

number, layers = int(sys.argv[1]), json.loads(sys.argv[2])
calls = count(1)


def killing(name: str) -> None:
    original = getattr(storage.FileStorage, name)

    def call(self: storage.FileStorage, *arguments: Any) -> None:
        if ".writable" not in arguments and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *arguments)

    setattr(storage.FileStorage, name, call)


for verb in ("upload", "write", "delete"):
    killing(verb)
preparation(preset("laptop", layers))
