"""Parts of a message as Flower's records, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

LARGE = 4096  # bytes; each larger part is an object of its own, which is sent once however many messages hold it
SMALL_PARTS, LARGE_PARTS = "small", "large"


def as_records(parts: Mapping[str, bytes]) -> RecordDict:
    """The parts of a message, as records.

    Example:
        >>> parts_of(as_records({"digest": b"12", "values": bytes(5000)})).keys()
        dict_keys(['digest', 'values'])
    """
    small = ConfigRecord({name: bytes(data) for name, data in parts.items() if len(data) < LARGE})
    large = {name: _array(data) for name, data in parts.items() if len(data) >= LARGE}
    return RecordDict({SMALL_PARTS: small, LARGE_PARTS: ArrayRecord(large)})


def _array(data: bytes) -> Array:
    return Array(dtype="uint8", shape=(len(data),), stype="bytes", data=bytes(data))


def parts_of(records: RecordDict) -> dict[str, bytes]:
    """The parts of a message; what is not one of them is left out."""
    small, large = records.get(SMALL_PARTS), records.get(LARGE_PARTS)
    found: dict[str, bytes] = {}
    if isinstance(small, ConfigRecord):
        found |= {name: value for name, value in small.items() if isinstance(value, bytes)}
    if isinstance(large, ArrayRecord):
        found |= {name: array.data for name, array in large.items()}
    return found


class NodeMemory(MutableMapping[str, bytes]):
    """What a node keeps between messages, in Flower's state of the node: each entry in a record of its own.

    Args:
        state: The state of the node in this run.
    """

    def __init__(self, state: RecordDict) -> None:
        self._state = state

    def __getitem__(self, key: str) -> bytes:
        record = self._state[key]
        if not isinstance(record, ArrayRecord):
            raise KeyError(key)
        data: bytes = record["data"].data
        return data

    def __setitem__(self, key: str, value: bytes) -> None:
        self._state[key] = ArrayRecord({"data": _array(value)})

    def __delitem__(self, key: str) -> None:
        del self._state[key]

    def __iter__(self) -> Iterator[str]:
        return iter([key for key, record in self._state.items() if isinstance(record, ArrayRecord)])

    def __len__(self) -> int:
        return len(list(iter(self)))
