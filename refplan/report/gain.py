"""What planning gained over the prior alone: in pairs where the same episodes were played, and in plain words."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from refplan.report.charts import level
from refplan.report.gather import Evaluation
from refplan.stats import Interval, mean_interval

ORDER = ("none", "critic", "mppi", "loop", "refplan")  # from the prior alone to the paper's method
TITLES = {"none": "prior alone", "critic": "critic's choice", "mppi": "MPPI", "loop": "LOOP", "refplan": "RefPlan"}
RUNS_FOR_AN_INTERVAL = 3


def title_of(planner: str) -> str:
    """How a planner is called in a sentence."""
    return TITLES.get(planner, planner)


def rank_of(planner: str) -> int:
    """Where a planner stands in tables; unknown ones last."""
    return ORDER.index(planner) if planner in ORDER else len(ORDER)


@dataclass(frozen=True, eq=False)
class Entry:
    """All evaluations of one agent in one world: one setting, several seeds or runs."""

    dataset: str
    prior: str
    world: str
    planner: str
    settings: dict[str, Any]  # without the run's name
    rows: tuple[Evaluation, ...]

    @property
    def scored(self) -> bool:
        """Whether the world has reference scores."""
        return _scored(self.rows)

    @cached_property
    def interval(self) -> Interval:
        """Mean score (without references: return) and its 95 % interval; low == high means unknown.

        Over runs where there are at least three of them, else over the episodes of all rows.
        """
        row = self.rows[0]
        if len(self.rows) == 1 and row.returns is None and row.score_low is not None and row.score_high is not None:
            return Interval(_mean(row, True), row.score_low, row.score_high)
        return _interval([_run_of(row) for row in self.rows], [_values(row, self.scored) for row in self.rows])

    @property
    def ms_per_action(self) -> float | None:
        """Mean over rows."""
        known = [row.ms_per_action for row in self.rows if row.ms_per_action is not None]
        return float(np.mean(known)) if known else None


def find_entries(evaluations: Iterable[Evaluation]) -> list[Entry]:
    """Evaluations of the same agent put together; prior first, then planners in the order of the paper.

    Of evaluations made twice (same seed, same run) the later counts: the same episodes are no new evidence.
    """
    groups: dict[tuple[str, ...], dict[tuple[str, str], Evaluation]] = {}
    for row in evaluations:
        settings = {name: value for name, value in row.settings.items() if name != "run"}
        key = (row.dataset, row.prior, row.world, row.planner, json.dumps(settings, sort_keys=True))
        groups.setdefault(key, {})[row.seed, _run_of(row)] = row
    entries = [Entry(*key[:4], json.loads(key[4]), tuple(rows.values())) for key, rows in groups.items()]
    return sorted(entries, key=lambda e: (e.dataset, e.world, e.prior, rank_of(e.planner)))


@dataclass(frozen=True, eq=False)
class Gain:
    """A planner beside the prior it plans with."""

    entry: Entry
    before: float
    after: float
    change: Interval  # low == high: unknown
    basis: str  # what the interval is over
    unit: str

    @property
    def verdict(self) -> str:
        """`helped`, `hurt`, or `unclear`."""
        if self.change.low == self.change.high:
            return "unclear"
        return "helped" if self.change.low > 0 else "hurt" if self.change.high < 0 else "unclear"


def find_gains(entries: Sequence[Entry]) -> list[Gain]:
    """Every planner that was evaluated beside its own prior, under the same seeds."""
    alone: dict[tuple[str, ...], Evaluation] = {}
    for entry in entries:
        if entry.planner == "none":
            alone |= {_pair_key(row): row for row in entry.rows}
    found = []
    for entry in entries:
        pairs = [(alone[_pair_key(row)], row) for row in entry.rows if _pair_key(row) in alone]
        if entry.planner != "none" and pairs:
            found.append(_gain(entry, pairs))
    return found


def _pair_key(row: Evaluation) -> tuple[str, ...]:
    return (row.dataset, row.prior, row.world, row.seed, str(row.settings.get("run", "")))


def _gain(entry: Entry, pairs: list[tuple[Evaluation, Evaluation]]) -> Gain:
    scored = _scored([row for pair in pairs for row in pair])
    before, after = (float(np.mean([_mean(row, scored) for row in side])) for side in zip(*pairs, strict=True))
    unit = "points" if scored else "return"
    differences = [_difference(*pair, scored) for pair in pairs]
    if any(each is None for each in differences):
        return Gain(entry, before, after, _unpaired(pairs, scored, after - before), "from the two intervals", unit)
    runs, known = [_run_of(row) for _, row in pairs], [each for each in differences if each is not None]
    change = _interval(runs, known)
    count = len(set(runs))
    if count >= RUNS_FOR_AN_INTERVAL:
        return Gain(entry, before, after, change, f"over {count} runs", unit)
    return Gain(entry, before, after, change, f"over {sum(map(len, known))} paired episodes", unit)


def _difference(prior: Evaluation, planned: Evaluation, scored: bool) -> np.ndarray | None:
    """Per episode, where both rows have the returns of the same starts."""
    if prior.returns is None or planned.returns is None:
        return None
    count = min(len(prior.returns), len(planned.returns))
    left, right = _values(prior, scored), _values(planned, scored)
    return right[:count] - left[:count]


def _scored(rows: Sequence[Evaluation]) -> bool:
    return all(row.score is not None and (row.returns is None or score_slope(row.world)) for row in rows)


def _mean(row: Evaluation, scored: bool) -> float:
    return row.score if scored and row.score is not None else row.earned


def _values(row: Evaluation, scored: bool) -> np.ndarray:
    """Scores (or returns) per episode; without them the mean alone. Scores are returns on another scale."""
    if row.returns is None:
        return np.array([_mean(row, scored)])
    return _mean(row, scored) + (row.returns - row.returns.mean()) * (score_slope(row.world) if scored else 1.0)


def score_slope(world: str) -> float:
    """Score points per unit of return, from the task's references; 0 where there are none."""
    from refplan.data.tasks import TASKS, task

    references = task(world).references if world in TASKS else None
    return 100.0 / (references.high - references.low) if references else 0.0


def _run_of(row: Evaluation) -> str:
    """What was trained: the run folder where a row names it; else every seed is a training of its own."""
    return str(row.settings.get("run") or f"seed {row.seed}")


def _interval(runs: list[str], values: list[np.ndarray]) -> Interval:
    """Of the mean: over runs if there are enough of them, else over episodes."""
    if len(set(runs)) >= RUNS_FOR_AN_INTERVAL:
        groups = {run: [v for r, v in zip(runs, values, strict=True) if r == run] for run in sorted(set(runs))}
        return mean_interval([float(np.mean(np.concatenate(group))) for group in groups.values()])
    return mean_interval(np.concatenate(values))


def _unpaired(pairs: list[tuple[Evaluation, Evaluation]], scored: bool, change: float) -> Interval:
    """Half-widths of independent means add in squares."""
    if not scored or any(row.score_low is None or row.score_high is None for pair in pairs for row in pair):
        return Interval(change, change, change)
    widths = [(row.score_high or 0.0) - (row.score_low or 0.0) for pair in pairs for row in pair]
    half = 0.5 * math.sqrt(sum(width**2 for width in widths)) / len(pairs)
    return Interval(change, change - half, change + half)


def headline(entries: Sequence[Entry], gains: Sequence[Gain]) -> str:
    """One sentence: what planning gained, or that it did not."""
    if not entries:
        return "Nothing has been evaluated yet."
    if not any(entry.planner != "none" for entry in entries):
        return f"No planner has been evaluated yet; {_plain(entries)}"
    if not gains:
        return "No prior alone was evaluated under the same seeds, so what planning gained cannot be said."
    chosen = _furthest(gains)
    gain = headline_gain(gains)
    return _one(gain, len(chosen)) if gain else _many(chosen)


def headline_gain(gains: Sequence[Gain]) -> Gain | None:
    """The gain a single sentence is about; None without any, or where there are several places to speak of.

    Of several settings it is the one evaluated most often, not the one that did best.
    """
    chosen = _furthest(gains)
    if len({_place(gain) for gain in chosen}) != 1:
        return None
    return max(chosen, key=lambda gain: sum(row.episodes for row in gain.entry.rows))


def _furthest(gains: Sequence[Gain]) -> list[Gain]:
    """Gains of the planner nearest to the paper's method."""
    known = [gain.entry.planner for gain in gains]
    name = max(known, key=lambda planner: ORDER.index(planner) if planner in ORDER else -1, default="")
    return [gain for gain in gains if gain.entry.planner == name]


def _place(gain: Gain) -> tuple[str, str, str]:
    return gain.entry.dataset, gain.entry.prior, gain.entry.world


def _plain(entries: Sequence[Entry]) -> str:
    entry = entries[0]
    unit = "a score of" if entry.scored else "a return of"
    return f"{entry.prior} alone reaches {unit} {level(entry.interval.value)} in {entry.world}."


def _one(gain: Gain, settings: int) -> str:
    """One planner, one world."""
    name, prior, change = title_of(gain.entry.planner), gain.entry.prior, gain.change
    start = {"helped": "Planning helped", "hurt": "Planning made it worse", "unclear": "No clear gain from planning"}
    what = "scores" if gain.unit == "points" else "earns"
    sure = f"95 % interval {level(change.low, True)} to {level(change.high, True)}, {gain.basis}"
    if change.low == change.high:
        sure = "too few episodes to say how sure that is"
    tried = f" One of {settings} settings tried; all are in the table." if settings > 1 else ""
    return (
        f"{start[gain.verdict]}: {name} {what} {level(gain.after)} where its prior ({prior}) alone {what} "
        f"{level(gain.before)}, a change of {level(change.value, True)} {gain.unit} ({sure}).{tried}"
    )


def _many(gains: Sequence[Gain]) -> str:
    counts = {word: sum(gain.verdict == word for gain in gains) for word in ("helped", "unclear", "hurt")}
    name, places = title_of(gains[0].entry.planner), len({_place(gain) for gain in gains})
    mean = float(np.mean([gain.change.value for gain in gains]))
    average = f"; on average {level(mean, True)} points" if all(gain.unit == "points" for gain in gains) else ""
    return (
        f"{name} over {places} combinations of data, prior and world: clearly better than the prior alone "
        f"{counts['helped']} times, no clear difference {counts['unclear']} times, clearly worse {counts['hurt']} "
        f"times{average}."
    )
