"""What planners must do at their limits, in worlds where the answer is known."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import GAMMA, LinearModel, LinearPrior, matrices, riccati, true_cost

from refplan.dynamics.base import AbstractTermination
from refplan.planners.base import Considered
from refplan.planners.core import (
    Mixing,
    _draw,
    around_own,
    combine,
    effective_count,
    kappa_for,
    move_plans,
    propose,
    score,
    weigh,
)
from refplan.planners.loop import LOOP
from refplan.planners.refplan import RefPlan

P, K = riccati()
OBS = jnp.asarray([1.0, -0.5])
BOX = (jnp.asarray([-8.0]), jnp.asarray([8.0]))
PLANNERS = {"loop": LOOP, "refplan": RefPlan}


def bad_prior(**changes) -> LinearPrior:
    return LinearPrior(0.3 * K, P, **changes)


def planner(kind=RefPlan, model=None, prior=None, **changes):
    options = {"plans": 40, "horizon": 3, "discount": GAMMA, "sigma": 0.1, "kappa": 2.0}
    return kind(prior or bad_prior(), model or LinearModel(), low=BOX[0], high=BOX[1], **{**options, **changes})


@eqx.filter_jit
def compiled_plan(agent, obs, key):
    return agent.plan(agent.start(), obs, key)[0]


def make_plan(agent, obs=OBS, seed=0):
    return compiled_plan(agent, obs, jr.key(seed))


@eqx.filter_jit
def compiled_move(model, hypothesis, obs, actions, key):
    draws = _draw(key, (1, 1), len(obs), model.members, obs.shape[1])
    return move_plans(model, hypothesis, obs, actions, jax.tree.map(lambda x: x[0], draws))


@pytest.mark.parametrize("kind", PLANNERS.values(), ids=PLANNERS)
def test_kappa_zero_is_the_mean_of_proposals_and_infinity_the_best_one(kind):
    flat = make_plan(planner(kind, kappa=0.0))
    assert np.allclose(flat.action, flat.proposals[:, 0].mean(0), atol=1e-5)
    assert np.allclose(flat.effective_plans, 40, rtol=1e-4)
    sharp = make_plan(planner(kind, kappa=1e6))
    best = int(np.argmax(sharp.scores[0]))
    assert np.allclose(sharp.action, sharp.proposals[best, 0], atol=1e-5)
    assert np.allclose(sharp.effective_plans, 1, rtol=1e-4)


@pytest.mark.parametrize("kind", PLANNERS.values(), ids=PLANNERS)
def test_without_noise_and_with_mean_proposals_it_is_the_prior(kind):
    agent = planner(kind, sigma=0.0, proposal="mean")
    assert np.allclose(make_plan(agent).action, -0.3 * K @ OBS, atol=1e-6)


@pytest.mark.parametrize("kind", PLANNERS.values(), ids=PLANNERS)
def test_anchored_at_the_prior_the_weights_move_its_own_action(kind):
    own = bad_prior().act((), OBS, jr.key(0))[0]
    assert np.allclose(make_plan(planner(kind, kappa=0.0, anchor="prior")).action, own, atol=1e-5)
    apart, together = (make_plan(planner(kind, anchor=anchor)) for anchor in ("plans", "prior"))
    moved = apart.action - apart.proposals[:, 0].mean(0)
    assert abs(float(moved[0])) > 1e-2
    assert np.allclose(together.action, own + moved, atol=1e-5)


class ElsewhereModel(LinearModel):
    """A model that knows it is in another world."""

    def away(self, belief):
        return jnp.ones((), bool)


@pytest.mark.parametrize("kind", PLANNERS.values(), ids=PLANNERS)
def test_away_from_home_nothing_holds_a_careful_planner_at_the_prior(kind):
    careful = {"anchor": "prior", "width": 0.3}
    free, opened, held = (
        make_plan(planner(kind, model, **settings))
        for model, settings in ((LinearModel(), {}), (ElsewhereModel(), careful), (LinearModel(), careful))
    )
    assert np.array_equal(free.proposals, opened.proposals) and np.array_equal(free.action, opened.action)
    assert np.std(held.proposals[:, 0]) < 0.7 * np.std(free.proposals[:, 0])
    wide = make_plan(planner(kind, ElsewhereModel(), width=2.0)), make_plan(planner(kind, width=2.0))
    assert np.array_equal(*(plan.proposals for plan in wide)), "what is wider already stays as it is"


@pytest.mark.parametrize("kind", PLANNERS.values(), ids=PLANNERS)
def test_with_the_own_action_as_anchor_only_another_world_is_planned_for(kind):
    at_home = planner(kind, anchor="own")
    plan = make_plan(at_home)
    own, _ = at_home.prior.act(at_home.prior.start(), OBS, jr.key(0))
    np.testing.assert_array_equal(plan.action, own)
    assert not plan.fallback, "it is a choice, not an accident"
    elsewhere, free = make_plan(planner(kind, ElsewhereModel(), anchor="own")), make_plan(planner(kind))
    np.testing.assert_array_equal(elsewhere.action, free.action)


def test_an_anchor_ignores_what_is_not_a_number():
    proposals, mean = jnp.asarray([[[1.0]], [[jnp.nan]], [[3.0]], [[9.0]]]), jnp.asarray([[2.5]])
    scored = jnp.asarray([True, True, True, False])
    assert np.allclose(around_own(mean, proposals, scored, jnp.asarray([7.0])), 7.5)
    assert np.allclose(around_own(mean, proposals, scored, jnp.asarray([jnp.nan])), 2.5)


def test_width_is_how_far_proposals_go_from_the_prior():
    own = np.asarray(bad_prior().act((), OBS, jr.key(0))[0])
    plans = [make_plan(planner(sigma=0.0, width=width)) for width in (0.0, 0.5, 1.0)]
    none, half, whole = (np.asarray(plan.proposals[:, 0]) - own for plan in plans)
    assert np.allclose(none, 0.0, atol=1e-6) and np.std(whole) > 0.1
    assert np.allclose(2.0 * half, whole, atol=1e-5)


def test_identical_latents_equal_one_latent_and_a_constant_latent_equals_loop():
    one, four = make_plan(planner(latents=1)), make_plan(planner(latents=4))
    assert np.allclose(one.action, four.action, atol=1e-6)
    assert np.allclose(make_plan(planner(LOOP)).action, one.action, atol=1e-6)


@pytest.mark.parametrize("kind", (LOOP, RefPlan))
def test_a_shortlist_scores_the_plans_that_look_best_and_forgets_the_others(kind):
    model = LinearModel(gains=(0.0, 0.4, -0.3, 0.1))
    whole, short = make_plan(planner(kind, model)), make_plan(planner(kind, model, shortlist=10))
    listed = np.isfinite(np.asarray(short.scores[0]))
    assert listed.sum() == 10 and np.asarray(short.weights)[:, ~listed].sum() == 0
    assert np.allclose(short.proposals, whole.proposals, atol=1e-6)
    assert np.allclose(short.scores[:, listed], whole.scores[:, listed], atol=1e-5)
    glance = np.asarray(whole.returns[0, :, :2].mean(axis=1))
    assert glance[listed].min() >= glance[~listed].max(), "the first two members' best"
    hard = [make_plan(planner(kind, model, shortlist=n, kappa=1e6)).action for n in (0, 10)]
    assert np.allclose(*hard, atol=1e-5), "the best of all is among them here"
    assert np.array_equal(make_plan(planner(kind, model, shortlist=40)).action, whole.action)


def test_anchored_at_the_prior_a_shortlist_is_held_against_all_proposals():
    plan = make_plan(planner(LOOP, shortlist=10, anchor="prior", sigma=0.01))
    own = bad_prior().act((), OBS, jr.key(0))[0]
    weighted = np.einsum("wn,na->a", plan.weights, plan.proposals[:, 0]) / len(plan.weights)
    assert np.allclose(plan.action, own + weighted - plan.proposals[:, 0].mean(0), atol=1e-5)


def test_a_glance_that_is_not_finite_comes_last():
    agent = planner(LOOP, shortlist=10)
    plans = jr.normal(jr.key(1), (40, 3, 1)).at[:25].set(jnp.inf)
    looks = np.asarray(agent.glance(agent.start(), OBS, plans))
    assert np.all(looks[:25] == -np.inf) and np.isfinite(looks[25:]).all()


def test_permuting_members_changes_nothing():
    gains = (0.0, 0.4, -0.3, 0.1)
    plans = jr.normal(jr.key(1), (20, 3, 1))
    agents = [planner(LOOP, LinearModel(gains=g), penalty=0.7) for g in (gains, gains[::-1])]
    a, b = (agent.evaluate((), agent.worlds((), OBS, jr.key(0)), OBS, plans, jr.key(0)) for agent in agents)
    assert np.allclose(a[..., ::-1], b, atol=1e-5)
    assert not np.allclose(a, b, atol=1e-3)
    actions = [
        agent.decide(Considered(plans, r, r.mean(2) - 0.7 * r.std(2), jnp.ones(20, bool)), OBS[:1], jr.key(0)).action
        for agent, r in zip(agents, (a, b), strict=True)
    ]
    assert np.allclose(*actions, atol=1e-6)


def test_a_constant_added_to_all_rewards_changes_nothing():
    plain = make_plan(planner())
    shifted = make_plan(planner(model=LinearModel(shift=7.0)))
    assert np.allclose(plain.action, shifted.action, atol=1e-4)
    assert np.allclose(shifted.scores - plain.scores, 7.0 * (1 + GAMMA + GAMMA**2), atol=1e-3)


def test_the_penalty_counts_disagreement():
    model = LinearModel(gains=(0.5, -0.5))
    free, charged = (make_plan(planner(LOOP, model, penalty=p)) for p in (0.0, 2.0))
    spread = np.std(free.returns, axis=2)
    assert np.allclose(free.scores - charged.scores, 2.0 * spread, atol=1e-4)
    literal = make_plan(planner(LOOP, model, penalty=2.0, spread="variance"))
    assert np.allclose(free.scores - literal.scores, 2.0 * spread**2, atol=1e-4)


def test_proposals_spread_with_sigma():
    stds = [
        make_plan(planner(prior=bad_prior(spread=0.0), sigma=s, plans=400)).proposals[:, 0].std() for s in (0.1, 0.4)
    ]
    assert stds[0] == pytest.approx(0.1, rel=0.15)
    assert stds[1] / stds[0] == pytest.approx(4.0, rel=1e-3)


def test_weights_by_hand_and_without_the_unusable():
    scores = jnp.asarray([1.0, 2.0, jnp.nan, -jnp.inf, 3.0])
    weights = weigh(scores, jnp.asarray(0.5))
    expected = np.exp([0.5, 1.0, 1.5]) / np.exp([0.5, 1.0, 1.5]).sum()
    assert np.allclose(weights, [expected[0], expected[1], 0, 0, expected[2]], atol=1e-6)
    assert float(weigh(jnp.asarray([jnp.nan, -5.0, -6.0]), jnp.asarray(1.0))[0]) == 0.0
    assert not weigh(jnp.full(3, jnp.nan), jnp.asarray(1.0)).any()
    assert np.allclose(weigh(jnp.asarray([1e30, 0.0]), jnp.asarray(1e3)), [1, 0])


@given(st.floats(1.5, 9.0), st.floats(0.1, 1000.0))
@settings(deadline=None, max_examples=20)
def test_kappa_for_a_number_of_plans_does_not_know_the_scale(count, scale):
    scores = jnp.asarray(np.random.default_rng(0).normal(size=10) * scale, jnp.float32)
    kappa = kappa_for(scores, jnp.asarray(count))
    assert float(effective_count(weigh(scores, kappa))) == pytest.approx(count, rel=0.02)


def test_temperature_by_effective_share():
    plan = make_plan(planner(effective=0.25))
    assert np.allclose(plan.effective_plans, 10, rtol=0.02)


class Wall(AbstractTermination):
    """The world ends right of x = 1."""

    def __call__(self, obs, action, next_obs):
        return next_obs[0] > 1.0


def test_nothing_is_earned_after_an_end_and_the_ending_step_counts():
    model = LinearModel(termination=Wall())
    start = jnp.asarray([0.95, 1.0])  # x grows by 0.1: the first step crosses the wall
    plans = jnp.zeros((1, 3, 1))
    options = {"discount": jnp.asarray(0.9), "propagation": "mean"}
    got = score(bad_prior(), model, (), model.mean, start, plans, jr.key(0), **options)
    first_reward = -(0.95**2 + 0.1 * 1.0)
    assert float(got[0, 0]) == pytest.approx(first_reward, rel=1e-5)
    safe = score(bad_prior(), LinearModel(), (), model.mean, start, plans, jr.key(0), **options)
    assert float(safe[0, 0]) < first_reward, "without the wall later costs and the terminal value count too"


def test_scores_by_a_plain_loop():
    """Algorithm 2 written out step by step in NumPy: lines 9 to 14 and the expectation of eq. 14."""
    model = LinearModel(gains=(0.0, 0.2, -0.1), spread=0.5)
    agent = planner(model=model, latents=3, penalty=0.3)
    plan = make_plan(agent)
    keys = jr.split(jr.split(jr.key(0), 3)[1], 3)  # as `plan` and `consider` split them
    latents = np.asarray(agent.worlds((), OBS, keys[1]))
    A, B, Q, R = (np.asarray(x, np.float64) for x in matrices())
    gains = np.asarray(model.gains, np.float64)
    total = np.zeros(1)
    for j, theta in enumerate(latents):
        scores = []
        for n in range(40):
            members = []
            for gain in gains:
                s, earned = np.asarray(OBS, np.float64), 0.0
                for h in range(3):
                    a = np.asarray(plan.proposals[n, h], np.float64)
                    earned += GAMMA**h * -(s @ Q @ s + a @ R @ a)
                    s = A @ s + (1 + gain) * theta * (B @ a)
                members.append(earned + GAMMA**3 * -(s @ P @ s))
            scores.append(np.mean(members) - 0.3 * np.std(members))
        assert np.allclose(scores, plan.scores[j], atol=1e-3)
        weights = np.exp(2.0 * (np.array(scores) - max(scores)))
        weights /= weights.sum()
        total += weights @ np.asarray(plan.proposals[:, 0], np.float64)
    assert np.allclose(plan.action, total / 3, atol=1e-5)


def test_proposals_by_a_plain_loop():
    model = LinearModel()
    options = {"plans": 4, "sigma": jnp.asarray(0.0), "low": BOX[0], "high": BOX[1], "proposal": "mean"}
    options |= {"mixing": Mixing(jnp.zeros((3, 1)), jnp.asarray(0.0)), "discount": jnp.asarray(GAMMA)}
    options["width"] = jnp.asarray(1.0)
    got = propose(bad_prior(), model, (), model.mean, OBS, jr.key(0), **options).actions
    A, B, _, _ = matrices()
    s = np.asarray(OBS, np.float64)
    for h in range(3):
        a = -0.3 * K @ s
        assert np.allclose(got[:, h], a, atol=1e-5)
        s = A @ s + B @ a


def test_every_plan_is_moved_once_by_a_uniformly_random_elite():
    model = LinearModel(gains=(0.0, 1.0, 2.0))
    obs, acts = jnp.zeros((10, 2)), jnp.ones((10, 1))
    seen = []
    for seed in range(200):
        after, _ = compiled_move(model, model.mean, obs, acts, jr.key(seed))
        seen.append(np.round(np.asarray(after[:, 1]) / 0.1).astype(int))
    seen = np.array(seen)
    assert set(np.unique(seen)) == {1, 2, 3}
    shares = np.stack([(seen == e).mean(0) for e in (1, 2, 3)])
    assert np.abs(shares - 1 / 3).max() < 0.12
    counts = np.stack([(seen == e).sum(1) for e in (1, 2, 3)])
    assert counts.min() >= 2
    assert counts.max() <= 4


@pytest.mark.parametrize("propagation", ["sample", "common", "mean"])
def test_propagation_draws_what_it_says(propagation):
    model = LinearModel(noise=1.0)
    plans = jnp.zeros((30, 1, 1))
    options = {"discount": jnp.asarray(1.0), "propagation": propagation}
    got = score(bad_prior(), model, (), model.mean, OBS, plans, jr.key(0), **options)[:, 0]
    again = score(bad_prior(), model, (), model.mean, OBS, plans, jr.key(1), **options)[:, 0]
    if propagation == "mean":
        assert np.ptp(got) < 1e-5
        assert np.allclose(got, again)
    elif propagation == "common":
        assert np.ptp(got) < 1e-5, "equal plans get equal noise"
        assert abs(float(got[0] - again[0])) > 1e-3
    else:
        assert got.std() > 0.1


@pytest.mark.parametrize("kind", PLANNERS.values(), ids=PLANNERS)
def test_it_closes_the_gap_between_a_bad_prior_and_the_optimum(kind):
    # A critic of the optimal policy and a bad policy: what planning can add in one step is known.
    agent = planner(kind, prior=bad_prior(spread=3.0), kappa=50.0, plans=200, horizon=2)
    act = eqx.filter_jit(lambda o, k: agent.act(agent.start(), o, k)[0])
    start = np.array([2.0, 0.0])
    planned = true_cost(lambda s, t: act(jnp.asarray(s, jnp.float32), jr.fold_in(jr.key(1), t)), start)
    prior = true_cost(lambda s, t: -0.3 * K @ s, start)
    best = true_cost(lambda s, t: -K @ s, start)
    assert (planned - prior) / (best - prior) > 0.8


@pytest.mark.parametrize("kind", PLANNERS.values(), ids=PLANNERS)
@given(
    st.lists(
        st.one_of(st.floats(width=32), st.sampled_from([jnp.nan, jnp.inf, -jnp.inf, 3e38])), min_size=2, max_size=2
    )
)
@settings(deadline=None, max_examples=40)
def test_whatever_is_seen_the_action_is_finite_and_inside(kind, values):
    plan = make_plan(planner(kind), jnp.asarray(values, jnp.float32))
    assert np.isfinite(plan.action).all()
    assert (plan.action >= BOX[0]).all()
    assert (plan.action <= BOX[1]).all()


def test_a_useless_model_falls_back_to_the_prior_and_says_so():
    plan = make_plan(planner(model=LinearModel(shift=jnp.nan)))
    assert bool(plan.fallback)
    assert np.allclose(plan.action, -0.3 * K @ OBS, atol=1e-6)
    assert not bool(make_plan(planner()).fallback)


def test_settings_are_swept_without_compiling_again():
    traces = []

    @eqx.filter_jit
    def act(agent, obs, key):
        traces.append(1)
        return agent.act(agent.start(), obs, key)[0]

    for kappa, sigma, penalty in [(1.0, 0.1, 0.0), (5.0, 0.2, 0.3), (9.0, 0.0, 1.0)]:
        act(planner(kappa=kappa, sigma=sigma, penalty=penalty), OBS, jr.key(0))
    assert len(traces) == 1


def test_resampling_executes_one_of_the_plans():
    plan = make_plan(planner(choice="resample"))
    gaps = np.abs(np.asarray(plan.proposals[:, 0]) - np.asarray(plan.action)).sum(1)
    assert gaps.min() < 1e-6


def test_many_episodes_at_once_equal_one_by_one():
    agent = planner()
    obs, keys = jnp.stack([OBS, -OBS, 0.1 * OBS]), jr.split(jr.key(3), 3)
    many = eqx.filter_jit(jax.vmap(compiled_plan, (None, 0, 0)))(agent, obs, keys).action
    for i in range(3):
        assert np.allclose(many[i], compiled_plan(agent, obs[i], keys[i]).action, atol=1e-5)


def test_combine_is_the_mean_over_worlds():
    proposals = jnp.arange(6.0).reshape(3, 1, 2)
    weights = jnp.asarray([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    assert np.allclose(combine(proposals, weights), (proposals[0] + (proposals[1] + proposals[2]) / 2) / 2)


def test_a_planner_can_be_asked_for_less_than_its_defaults():
    agent = dataclasses.replace(planner(), kappa=jnp.asarray(0.0))
    assert float(agent.kappa) == 0.0
