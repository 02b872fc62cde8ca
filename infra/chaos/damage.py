"""What storage can do to a file: one bit flips, the end is lost, all of it is gone."""

import random

from infra.storage import Storage


def flip(storage: Storage, name: str, chance: random.Random) -> str:
    """Flip one bit of the object; what was done."""
    data = bytearray(storage.read(name))
    place, bit = chance.randrange(len(data)), chance.randrange(8)
    data[place] ^= 1 << bit
    storage.write(name, bytes(data))
    return f"bit {bit} of byte {place:,} of {name}"


def truncate(storage: Storage, name: str, chance: random.Random) -> str:
    """Cut the object at any byte; what was done."""
    data = storage.read(name)
    length = chance.randrange(len(data))
    storage.write(name, data[:length])
    return f"{name} cut from {len(data):,} to {length:,} bytes"


def delete(storage: Storage, name: str, chance: random.Random) -> str:
    """Remove the object; what was done."""
    storage.delete(name)
    return f"{name} deleted"
