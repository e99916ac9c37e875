"""Runs in every format that a report reads, and mutations of their files such as damage, accident or malice leave."""

from __future__ import annotations

import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from made_up_runs import rounds, write_csv

from lightning_spectral.report.names import HIGH, LOW, MIDDLE
from lightning_spectral.report.wandb_file import BLOCK_BYTES, FILE_HEADER, whole_records

CLIENTS = {f"fl/clients/val_acc/{name}": x for name, x in ((LOW, 0.3), (MIDDLE, 0.5), (HIGH, 0.7))}
EXTRA = {**CLIENTS, "fl/terms_visited": 0.4, "fl/expected_coverage": 0.5, "fl/bit_entropy": 0.8}
ACCURACIES = (0.5, 0.6, 0.7)
BINS = ((0.0, 0.5, 3), (0.5, 1.0, 2))  # left edge, right edge, count
TABLE = {"columns": ["client", "val_acc"], "data": [[3, 0.5], [4, None]]}
ODD = (
    *("nan", "inf", "-inf", "-1", "0", "0.5", "1e18", "1e308", "1e-320", "1e400", "9" * 5000, "0x" + "f" * 5000),
    *("", "null", "true", "[]", "{}", '"x"', "[[1], {}]", "[" * 3000, '{"a":' * 3000, "- " * 500, "&a [*a, *a]"),
    *("$\\frac{$", "x^$", "<script>alert(1)</script>", "`", '"', "\n", "\r", "\t", "\0", "\x1b[31m", "\u202e", "é"),
    *("!!int x", "!!timestamp x", "<<", "2001-99-99", "1:1:1", "a" * 3000, "/", "../../x", "fl/round", "epoch", "name"),
    *("fl/bytes_down", "a/fl/loss", "a/val_acc", "_", "_type", "singular_values/", "font: 9px x", 'id="'),
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to three changes."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = rng.choice((_other_word, _other_word, _cut, _flipped, _without, _twice, _inserted))(content, rng)
    return content


def _slice(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content) + 1)
    return start, min(len(content), start + rng.choice((1, 4, 40, 4000)))


def _other_word(content: bytes, rng: random.Random) -> bytes:
    words = list(re.finditer(rb"[^\s,:\"{}\[\]|]+", content))
    if not words:
        return content
    word = rng.choice(words)
    return content[: word.start()] + rng.choice(ODD).encode() + content[word.end() :]


def _inserted(content: bytes, rng: random.Random) -> bytes:
    at, _ = _slice(content, rng)
    return content[:at] + rng.choice((rng.choice(ODD).encode(), rng.randbytes(8))) + content[at:]


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: _slice(content, rng)[0]]


def _flipped(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return content
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _without(content: bytes, rng: random.Random) -> bytes:
    start, end = _slice(content, rng)
    return content[:start] + content[end:]


def _twice(content: bytes, rng: random.Random) -> bytes:
    start, end = _slice(content, rng)
    return content[:end] + content[start:end] + content[end:]


def config_of(seed: int) -> dict[str, Any]:
    return {"federation": {"algorithm": "SpectralSharding(TopN(), keep_ratio=0.2)", "seed": seed}, "lr": 0.1}


def write_csv_run(folder: Path, seed: int) -> None:
    """A run of CSVLogger with the files of a dashboard."""
    write_csv(folder, rounds(ACCURACIES, **EXTRA), config_of(seed))
    (folder / "dashboard").mkdir()
    bins = "".join(f"singular_values/net,{left},{right},{count}\n" for left, right, count in BINS)
    (folder / "dashboard/histograms_000000.csv").write_text(f"histogram,left,right,count\n{bins}")
    (folder / "dashboard/clients_000000.csv").write_text("client,val_acc\n3,0.5\n4,\n")


def write_history(folder: Path, seed: int) -> None:
    """What `RoundHistory.save` writes."""
    folder.mkdir(parents=True)
    logged = rounds(ACCURACIES, **EXTRA)
    rows = [{**before, **after} for before, after in zip(logged[::2], logged[1::2], strict=True)]
    saved = {"rows": rows, "from_clients": list(logged[0]), "config": config_of(seed)}
    (folder / "run.json").write_text(json.dumps(saved))


def write_tensorboard(folder: Path, seed: int) -> None:
    """A run of TensorBoardLogger."""
    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1.host.2.0").write_bytes(as_events(_events()))
    (folder / "hparams.yaml").write_text(f"federation:\n  algorithm: FedAvg()\n  seed: {seed}\n")


def _events() -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
    from tensorboard.util.tensor_util import make_tensor_proto

    text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    for row in rounds(ACCURACIES, **EXTRA):
        for name, value in row.items():
            yield Event(step=int(row["step"]), summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))
    counted = HistogramProto(min=0, max=1, num=5, bucket_limit=[0.5, 1.0], bucket=[3, 2])
    cells = make_tensor_proto([b"| client | val_acc |\n| --- | --- |\n| 3 | 0.5 |"])
    yield Event(step=0, summary=Summary(value=[Summary.Value(tag="singular_values/net", histo=counted)]))
    table = Summary.Value(tag="tables/clients/text_summary", tensor=cells, metadata=text)
    yield Event(step=0, summary=Summary(value=[table]))


def as_events(events: Iterator[Any]) -> bytes:
    """An event file: every record with its length and the checksums of both."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    def framed(record: bytes) -> bytes:
        length = struct.pack("<Q", len(record))
        return b"".join(
            (length, struct.pack("<I", masked_crc32c(length)), record, struct.pack("<I", masked_crc32c(record)))
        )

    return b"".join(framed(event.SerializeToString()) for event in events)


def with_other_events(content: bytes, rng: random.Random) -> bytes:
    """The file with one event of other contents, whose checksum is right."""
    events = list(_events())
    event = rng.choice(events[-2:] + rng.sample(events, 2))
    (value,) = event.summary.value
    number = rng.choice((float("nan"), float("inf"), -1.0, 0.5, 1e18, 3e38))
    change = rng.randrange(6)
    if change == 0:
        event.step = rng.choice((-1, 2**63 - 1, 10**18))
    elif change == 1:
        value.tag = mutated(value.tag.encode(), rng).decode(errors="replace")
    elif change == 2:
        value.simple_value = number
    elif change == 3:
        value.tensor.tensor_shape.dim.add(size=rng.choice((0, -1, 3, 10**12)))
        value.tensor.float_val.append(number)
        value.tensor.dtype = rng.choice((1, 2, 7, 19, 99))
    elif change == 4:
        value.histo.bucket.append(number)
        value.histo.max = number
    else:
        value.tensor.string_val.append(mutated(b"| client | val_acc |\n| --- | --- |\n| 3 | 0.5 |", rng))
        value.tensor.dtype = 7
        value.metadata.plugin_data.plugin_name = rng.choice(("text", "scalars", "histograms"))
    return as_events(iter(events))


def write_wandb(folder: Path, seed: int, table: str = "media/table/clients.table.json") -> None:
    """An offline run of wandb, whose record of a table leads to a file."""
    (folder / "files/media/table").mkdir(parents=True)
    (folder / "files/media/table/clients.table.json").write_text(json.dumps(TABLE))
    (folder / "run-x.wandb").write_bytes(as_log(record.SerializeToString() for record in _records(seed, table)))


def _records(seed: int, path: str) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    begin, end = Record(), Record()
    begin.run.run_id = f"id{seed}"
    for name, value in config_of(seed).items():
        begin.run.config.update.add(key=name, value_json=json.dumps(value))
    end.exit.exit_code = 0
    histogram = {"_type": "histogram", "bins": [0.0, 0.5, 1.0], "values": [3, 2]}
    table = {"_type": "table-file", "path": path}
    media = {"fl/round": 0, "singular_values/net": histogram, "tables/clients": table}
    found = [begin]
    for row in (*rounds(ACCURACIES, **EXTRA), media):
        record = Record()
        for name, value in row.items():
            record.history.item.add(key=name, value_json=json.dumps(value))
        found.append(record)
    return [*found, end]


def as_log(records: Iterable[bytes]) -> bytes:
    """The records in LevelDB's log format, after wandb's header."""
    log = FILE_HEADER
    for record in records:
        kind, rest = "first", record
        while kind != "done":
            left = BLOCK_BYTES - len(log) % BLOCK_BYTES
            if left < 7:
                log, left = log + bytes(left), BLOCK_BYTES
            data, rest = rest[: left - 7], rest[left - 7 :]
            code = {("first", False): 1, ("first", True): 2, ("next", True): 3, ("next", False): 4}[kind, bool(rest)]
            log += struct.pack("<IHB", zlib.crc32(bytes([code]) + data), len(data), code) + data
            kind = "next" if rest else "done"
    return log


def with_another_record(content: bytes, rng: random.Random) -> bytes:
    """The file with one record of other contents, whose checksum is right."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(record) for record in whole_records(content)]
    record = rng.choice([records[0], records[-2], rng.choice(records[1:-1])])
    items = record.history.item or record.run.config.update
    item = rng.choice(items)
    if rng.random() < 0.7:
        item.value_json = mutated(item.value_json.encode(), rng).decode(errors="replace")
    elif rng.random() < 0.5:
        item.key = mutated(item.key.encode(), rng).decode(errors="replace")
    else:
        item.nested_key.extend(rng.choices((item.key, "a", "", "_type", "name"), k=rng.choice((1, 2, 2000))))
    return as_log(record.SerializeToString() for record in records)


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        write: Writes a run with a seed to a new folder.
        file: The file of the run that is mutated.
        run: The run's own file.
        mutate: The mutation.
    """

    write: Callable[[Path, int], None]
    file: str
    run: str
    mutate: Callable[[bytes, random.Random], bytes] = mutated


EVENTS, LOG, CSV = "events.out.tfevents.1.host.2.0", "run-x.wandb", "metrics.csv"
FORMATS = {
    "metrics": Format(write_csv_run, CSV, CSV),
    "settings": Format(write_csv_run, "hparams.yaml", CSV),
    "histograms": Format(write_csv_run, "dashboard/histograms_000000.csv", CSV),
    "client table": Format(write_csv_run, "dashboard/clients_000000.csv", CSV),
    "history": Format(write_history, "run.json", "run.json"),
    "event file": Format(write_tensorboard, EVENTS, EVENTS),
    "events": Format(write_tensorboard, EVENTS, EVENTS, with_other_events),
    "wandb file": Format(write_wandb, LOG, LOG),
    "wandb records": Format(write_wandb, LOG, LOG, with_another_record),
    "wandb table": Format(write_wandb, "files/media/table/clients.table.json", LOG),
}


def write_mutated(kind: str, folder: Path, seed: int) -> Path:
    """A run of which one file is mutated; its own file is returned."""
    made = FORMATS[kind]
    made.write(folder, seed)
    path = folder / made.file
    path.write_bytes(made.mutate(path.read_bytes(), random.Random(f"{kind} {seed}")))
    return folder / made.run
