"""A `Diagnosis` in words: what stands out, what it means for planning, and tables."""

import math
from collections.abc import Sequence

import numpy as np

from refplan.dynamics.diagnose_record import Diagnosis, ReturnMatch

# Where a number starts to matter. They are judgements, not theorems; the numbers themselves are always shown beside.
GOOD_RANK, WEAK_RANK = 0.7, 0.4  # rank correlation of imagined and realised return
TOO_NARROW, TOO_WIDE = 0.85, 0.97  # coverage of 90 % intervals
CLEARLY_BETTER = 0.9  # error over that of the best trivial predictor
MUCH_NOISE = 0.5  # share of score differences between plans that is noise
THIN_POSTERIOR = 0.25  # posterior std over the spread of posterior means
LITTLE_GAIN = 0.02  # nats per output that the latent saves against a constant one
DOUBT_RANK = 0.3  # rank correlation of members' spread and error


def useful_steps(d: Diagnosis) -> int:
    """For how many steps in a row, from the first, the model clearly beats both trivial predictors."""
    worse = d.errors.rmse >= CLEARLY_BETTER * np.minimum(d.errors.rmse_stays, d.errors.rmse_drifts)
    return int(np.argmax(worse)) if worse.any() else d.horizon


def useful_returns(d: Diagnosis) -> list[ReturnMatch]:
    """Plain returns whose imagined value ranks the realised ones, as far as the states can be trusted."""
    steps = useful_steps(d)
    return [r for r in d.returns if not r.with_value and r.horizon <= steps and r.spearman >= WEAK_RANK]


def find_flags(d: Diagnosis) -> tuple[str, ...]:
    """Short names of what stands out."""
    first, last = d.errors.coverage_90[0].mean(), d.errors.coverage_90[-1].mean()
    deepest = max(d.plans, key=lambda p: p.horizon)
    latent = d.latent
    found = {
        "diverges": d.diverged > 0,
        "no_better_than_trivial": useful_steps(d) == 0,
        "overconfident": first < TOO_NARROW,
        "underconfident": first > TOO_WIDE and d.errors.coverage_50[0].mean() > 0.65,
        "overconfident_far_ahead": first >= TOO_NARROW and last < TOO_NARROW,
        "returns_not_ranked": not useful_returns(d),
        "noise_dominates": deepest.noise_share > MUCH_NOISE,
        "doubt_is_blind": d.members > 1 and bool(d.doubt.member_rank[0] < DOUBT_RANK),
        "misses_ends": d.ends.recall < 0.5,
        "false_ends": d.ends.precision < 0.5,
        "thin_posterior": latent is not None and latent.posterior_std < THIN_POSTERIOR * latent.means_std,
        "latent_unused": latent is not None and latent.nll_constant - latent.nll_mean < LITTLE_GAIN,
    }
    return tuple(name for name, is_found in found.items() if is_found)


def make_verdict(d: Diagnosis) -> str:
    """Can planning help? A few sentences from the flags and their numbers."""
    flags, said = find_flags(d), [_opening(d)]
    sure = f"90 % intervals hold {_percent(d.errors.coverage_90[0].mean())} of the truths one step ahead"
    if "overconfident" in flags:
        said.append(f"The model is overconfident: its {sure}; do not trust penalties built on its spread.")
    elif "underconfident" in flags:
        said.append(f"The model is underconfident: its {sure}; sampled runs are noisier than the world.")
    elif "overconfident_far_ahead" in flags:
        far = _percent(d.errors.coverage_90[-1].mean())
        said.append(f"It is calibrated one step ahead but overconfident later: {far} at {d.horizon} steps.")
    else:
        said.append(f"It is calibrated one step ahead: its {sure}.")
    if "noise_dominates" in flags:
        deepest = max(d.plans, key=lambda p: p.horizon)
        said.append(
            f"{_percent(deepest.noise_share)} of the score differences between plans ({deepest.horizon} steps) is "
            "transition noise: plan with mean or common-noise propagation."
        )
    if "doubt_is_blind" in flags:
        said.append(
            f"Members disagree little where the model is wrong (rank correlation {d.doubt.member_rank[0]:.2f})."
        )
    said += _about_ends(d, flags) + _about_latent(d, flags)
    return " ".join(said)


def _opening(d: Diagnosis) -> str:
    if d.diverged > 0:
        start = f"{_percent(d.diverged)} of the imagined runs left the finite numbers. "
    else:
        start = ""
    steps, good = useful_steps(d), useful_returns(d)
    if steps == 0:
        return start + "Planning will not help: one step ahead the model is hardly better than a trivial guess."
    reach = f"the model clearly beats trivial guesses for {steps} of {d.horizon} steps"
    if not good:
        return (
            start + f"Planning is unlikely to help: {reach}, but imagined returns do not rank the realised ones "
            f"({_ranks(d)})."
        )
    best = max(good, key=lambda r: r.horizon)
    strength = "should" if best.spearman >= GOOD_RANK else "may"
    caveat = "" if not best.given_state < WEAK_RANK else ", though mostly by telling states apart, not actions"
    return (
        start
        + f"Planning up to {best.horizon} steps {strength} find better actions if the prior proposes any: {reach}, "
        f"and imagined returns rank realised ones across states ({_ranks(d)}){caveat}."
    )


def _ranks(d: Diagnosis) -> str:
    plain = [r for r in d.returns if not r.with_value]
    return "rank correlation " + ", ".join(f"{r.spearman:.2f} at H={r.horizon}" for r in plain)


def _about_ends(d: Diagnosis, flags: Sequence[str]) -> list[str]:
    if "misses_ends" not in flags and "false_ends" not in flags:
        return []
    numbers = f"recall {_number(d.ends.recall)}, precision {_number(d.ends.precision)}"
    return [f"Ends of the world are predicted badly ({numbers}): imagined returns near them are not to be trusted."]


def _about_latent(d: Diagnosis, flags: Sequence[str]) -> list[str]:
    if d.latent is None:
        return []
    said = []
    if "thin_posterior" in flags:
        said.append(
            f"The posterior's std ({d.latent.posterior_std:.3g}) is far below the spread of its means "
            f"({d.latent.means_std:.3g}): sampled latents are nearly one world, and more of them only average noise."
        )
    gain = d.latent.nll_constant - d.latent.nll_mean
    if "latent_unused" in flags:
        said.append(f"On this data the latent saves {gain:.3f} nat per output against a constant one: hardly used.")
    else:
        said.append(f"The latent saves {gain:.3f} nat per output against a constant one.")
    return said


def _percent(x: float) -> str:
    return f"{100 * x:.0f} %"


def _number(x: float) -> str:
    return "-" if not math.isfinite(x) else f"{x:.3g}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in [headings, *rows])


def make_text(d: Diagnosis) -> str:
    """All tables, then the verdict."""
    about = (
        f"{d.data}: {d.transitions} transitions of {d.episodes} episodes looked at, {d.segments} segments, "
        f"{d.members} members"
    )
    parts = [about, _errors_text(d), _returns_text(d), _plans_text(d), _ends_text(d)]
    parts += [_latent_text(d)] if d.latent else []
    return "\n\n".join([*parts, d.verdict])


def _errors_text(d: Diagnosis) -> str:
    e, c = d.errors, d.doubt
    columns = [e.rmse, e.median, e.rmse_sampled, e.rmse_draw, e.rmse_stays, e.rmse_drifts]
    columns += [e.coverage_50.mean(axis=1), e.coverage_90.mean(axis=1), e.calibration_error]
    columns += [c.member_rank, c.member_ratio, c.sampled_ratio]
    names = ["k", "rmse", "median", "sampled", "one draw", "stays", "drifts", "in 50 %", "in 90 %", "off by"]
    names += ["spread~error", "spread/error", "std/error"]
    rows = [[str(k + 1), *(_number(float(x[k])) for x in columns)] for k in range(d.horizon)]
    worst = np.argsort(-np.nan_to_num(e.rmse_per_output[0]))[:5]
    dims = ", ".join(f"{e.outputs[i]} {e.rmse_per_output[0, i]:.3g}" for i in worst)
    return (
        "Errors k steps ahead, in units of the std of one-step changes\n"
        + _table(names, rows)
        + f"\nlargest at k=1: {dims}\nNLL per output at k=1: {e.nll.mean():.3f} (single member "
        f"{e.nll_member.mean():.3f}, trivial {e.nll_trivial.mean():.3f})"
    )


def _returns_text(d: Diagnosis) -> str:
    names = ["H", "plus value", "pearson", "rank", "rank, sampled", "rank, other actions", "given state", "bias/std"]
    rows = []
    for r in d.returns:
        values = [r.pearson, r.spearman, r.spearman_sampled, r.spearman_shuffled, r.given_state, r.bias]
        rows.append([str(r.horizon), "yes" if r.with_value else "no", *map(_number, values)])
    return "Imagined against realised return, across states (the data has one plan per state)\n" + _table(names, rows)


def _plans_text(d: Diagnosis) -> str:
    names = ["H", "std by noise", "std by actions", "noise share", "rank, one draw vs mean"]
    rows = [[str(p.horizon), *map(_number, (p.noise_std, p.action_std, p.noise_share, p.ranking))] for p in d.plans]
    return "Scores of plans from one state\n" + _table(names, rows)


def _ends_text(d: Diagnosis) -> str:
    e = d.ends
    if e.logged == 0:
        return f"Ends: none logged; predicted at {_percent(e.false_alarm)} of the steps"
    return (
        f"Ends: {e.logged} logged; precision {_number(e.precision)}, recall {_number(e.recall)} "
        f"(given the true next state {_number(e.rule_precision)}, {_number(e.rule_recall)})"
    )


def _latent_text(d: Diagnosis) -> str:
    m = d.latent
    if m is None:
        return ""
    return (
        f"Latent: KL per step {m.kl_previous:.3g} to the step before, {m.kl_standard:.3g} to N(0, I), first "
        f"{m.kl_first:.3g}; posterior std {m.posterior_std:.3g}, spread of means {m.means_std:.3g} (between episodes "
        f"{_number(m.episode_std)}); settled after {m.settled_after} steps\n"
        f"NLL per output with m = mu {m.nll_mean:.3f}, sampled {m.nll_sampled:.3f}, constant {m.nll_constant:.3f}, "
        f"shuffled {m.nll_shuffled:.3f}, zero {m.nll_zero:.3f}"
    )
