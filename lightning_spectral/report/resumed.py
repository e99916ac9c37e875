"""Joins an interrupted run and those that resumed it into one run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import NamedTuple

from lightning_spectral.report.media import Media
from lightning_spectral.report.names import BYTES, REPETITION, ROUND, SECONDS
from lightning_spectral.report.runs import NOT_ENDED, LoggedRun, gaps
from lightning_spectral.report.settings import flat_settings

FLOAT32 = 1e-6  # relative tolerance: TensorBoard keeps no more digits


class Part(NamedTuple):
    """A run on the disk, and the data that decide which run it is part of."""

    run: LoggedRun
    settings: Mapping[str, str]
    since: float  # the first round that it trained; infinite if it only evaluated
    place: list[str | int]  # of its path in the order of names, in which 10 comes after 9


def join_resumed(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """Join the parts of runs that were interrupted and resumed.

    A part belongs to a run if it has the same settings, including seeds, and begins with the round after one that the
    run has. It also belongs to the run if their first rounds agree, down to the measured seconds; that happens because
    a history is part of the checkpoint, or because two loggers recorded the same run. Parts with the same wandb id, or
    in the same TensorBoard folder, need only the same seeds. From its first round on, a part replaces the run's earlier
    record of those rounds, which a crash has undone. If a part might belong to several runs, it is assigned to the one
    with its own id, then to the one that loses the fewest rounds to it, then to the last one before it in the order of
    names. Runs come in the order of their first parts, each under the name of its earliest part.
    """
    chains: list[list[Part]] = []
    for part in sorted(map(_part, runs), key=lambda part: ((part.since > 0) + math.isinf(part.since), part.place)):
        begun = [chain for chain in chains if _belongs(part, chain)]
        if begun:
            max(begun, key=lambda chain: _likelihood(chain, part)).append(part)
        else:
            chains.append([part])
    order = {id(run): index for index, run in enumerate(runs)}
    chains.sort(key=lambda chain: min(order[id(part.run)] for part in chain))
    return [_joined(chain) for chain in chains]


def _part(run: LoggedRun) -> Part:
    trained = (row[ROUND] for row in run.rows if any(name.endswith(BYTES) for name in row))
    return Part(run, flat_settings(run.config), next(trained, math.inf), _place(run.path))


def _place(path: Path) -> list[str | int]:
    return [int(piece) if index % 2 else piece for index, piece in enumerate(re.split(r"(\d+)", str(path)))]


def _belongs(part: Part, chain: Sequence[Part]) -> bool:
    first, run = chain[0], _joined(chain)
    if part.run.label != run.label:
        return False
    if part.run.identity and part.run.identity == run.identity:
        return _seeds(part) == _seeds(first)
    if not part.settings or part.settings != first.settings:
        return False
    follows = first.since < part.since and any(row[ROUND] == part.since - 1 for row in run.rows)
    return follows or _same_round(run.rows[0], part.run.rows[0])


def _likelihood(chain: Sequence[Part], part: Part) -> tuple[bool, int, bool, list[str | int]]:
    """How likely a part belongs to a run; of the possible runs, the one with the largest value is chosen."""
    run = _joined(chain)
    undone = sum(row[ROUND] >= part.since for row in run.rows)
    is_named = part.run.identity != "" and part.run.identity == run.identity
    return is_named, -undone, chain[-1].place < part.place, chain[-1].place


def _seeds(part: Part) -> dict[str, str]:
    return {name: value for name, value in part.settings.items() if REPETITION & set(name.split("/"))}


def _same_round(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether two rows are of the same round: the same seconds are never measured twice."""
    shared = one.keys() & other.keys()
    same = (math.isclose(one[name], other[name], rel_tol=FLOAT32) for name in shared if not math.isnan(one[name]))
    return any(SECONDS in name for name in shared) and all(same)


def _joined(chain: Sequence[Part]) -> LoggedRun:
    return reduce(_resumed, chain[1:], chain[0].run)


def _resumed(earlier: LoggedRun, part: Part) -> LoggedRun:
    later, kept = part.run, [row for row in earlier.rows if row[ROUND] < part.since]
    rows = {row[ROUND]: row for row in kept}
    rows.update({row[ROUND]: {**rows.get(row[ROUND], {}), **row} for row in later.rows})
    return replace(
        later,
        name=earlier.name,
        config=later.config or earlier.config,
        rows=tuple(rows[index] for index in sorted(rows)),
        media=_media(earlier, later, part.since),
        from_clients=earlier.from_clients | later.from_clients,
        notes=_notes(earlier, part),
        identity=later.identity or earlier.identity,
    )


def _media(earlier: LoggedRun, later: LoggedRun, since: float) -> dict[str, dict[int, Media]]:
    """The later run's media and those of the rounds before it; all of the earlier run's if the later one has none."""
    kept = {
        name: {index: media for index, media in by_round.items() if index < since or not later.media}
        for name, by_round in earlier.media.items()
    }
    return {name: {**kept.get(name, {}), **later.media.get(name, {})} for name in {**kept, **later.media}}


def _notes(earlier: LoggedRun, part: Part) -> tuple[str, ...]:
    """The notes of both, except on what was missing at the end of one or before the start of the other."""
    before = "/".join(earlier.path.parts[-2:])
    relation = f"continues {before} from round {part.since:g} on" if part.since > 0 else f"repeats {before}"
    return (
        *(note for note in earlier.notes if note != NOT_ENDED),
        *(note for note in part.run.notes if note not in gaps(part.run.rows)),
        *([relation] if math.isfinite(part.since) else []),
    )
