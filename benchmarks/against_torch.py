"""RefPlan's decision beside an eager PyTorch transcription of the same (cross-library environment only).

`.venv-cross/bin/python -m benchmarks against_torch [--json FILE]`: both in one process, in turns, on as many threads.
The transcription asks the critics and scores every plan; with a value net (`refplan.priors.distil`) and a shortlist
ours does less.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import torch

from refplan.agent import start_many
from refplan.bench.planner import ACT, OBS, decide, make_model, make_prior
from refplan.bench.products import median_seconds
from refplan.planners.refplan import RefPlan
from refplan.types import Transition

PLANS, ROUNDS = 100, 5
SHAPES = ((2, 4, 5), (4, 4, 14), (4, 16, 14))  # horizon, latents, members
OURS = {"act refplan": (False, 0), "value net": (True, 0), "shortlist": (False, 30), "value net, shortlist": (True, 30)}


class TorchPlanner:
    """The same arithmetic, written as one writes it in PyTorch: batched products, no Python loop over rows."""

    def __init__(self, planner: RefPlan):
        def tensor(x):
            return torch.from_numpy(np.array(x))

        def layers(net):
            return [(tensor(layer.weight), tensor(layer.bias)) for layer in net.layers]

        self.decoder = layers(planner.model.decoder.nets)
        self.actor, self.critics = layers(planner.prior.policy.net), layers(planner.prior.critics.nets)
        encoder = planner.model.encoder
        self.embed = [(tensor(e.weight), tensor(e.bias)) for e in (encoder.obs, encoder.action, encoder.reward)]
        self.gru = [(tensor(g.weight), tensor(g.bias)) for g in (encoder.gru.inputs, encoder.gru.recurrent)]
        self.heads = [(tensor(h.weight), tensor(h.bias)) for h in (encoder.mean, encoder.log_var)]
        self.horizon, self.latents = planner.horizon, planner.latents
        self.members = planner.model.members

    def advance(self, memory, obs, action, reward):
        parts = [x @ w + b for x, (w, b) in zip((obs, action, reward), self.embed, strict=True)]
        gates = torch.relu(torch.cat(parts)) @ self.gru[0][0] + self.gru[0][1]
        x, h = gates.chunk(3), (memory @ self.gru[1][0] + self.gru[1][1]).chunk(3)
        update, new = torch.sigmoid(x[1] + h[1]), torch.tanh(x[2] + torch.sigmoid(x[0] + h[0]) * h[2])
        return new + update * (memory - new)

    def predict(self, x):
        h = x
        for number, (w, b) in enumerate(self.decoder[:-1]):
            y = torch.nn.functional.silu(torch.baddbmm(b[:, None], h, w))
            h = y + h if number and y.shape == h.shape else y
        w, b = self.decoder[-1]
        return torch.baddbmm(b[:, None], h, w).chunk(2, dim=-1)[0]

    def policy(self, obs):
        h = obs
        for w, b in self.actor[:-1]:
            h = torch.relu(torch.addmm(b, h, w))
        w, b = self.actor[-1]
        mean, log_std = torch.addmm(b, h, w).chunk(2, dim=-1)
        return mean, log_std.clamp(-5.0, 2.0)

    def value(self, obs):
        h = torch.cat([obs, torch.tanh(self.policy(obs)[0])], dim=-1)[None].expand(2, -1, -1)
        for w, b in self.critics[:-1]:
            h = torch.relu(torch.baddbmm(b[:, None], h, w))
        w, b = self.critics[-1]
        return torch.baddbmm(b[:, None], h, w)[..., 0].min(0).values

    @torch.no_grad()
    def act(self, memory, obs, action, reward, kappa=5.0, sigma=0.05, penalty=0.1, discount=0.99):
        memory = self.advance(memory, obs, action, reward)
        mean, log_var = (self.advance(memory, obs, action, reward) @ w + b for w, b in self.heads)
        rows, proposals, group = obs.expand(PLANS, -1), [], -(-PLANS // self.members)
        for _ in range(self.horizon):
            centre, log_std = self.policy(rows)
            acts = torch.tanh(centre + log_std.exp() * torch.randn_like(centre))
            acts = (acts + sigma * torch.randn_like(acts)).clamp(-1, 1)
            proposals.append(acts)
            dealt = torch.randperm(group * self.members)
            back, dealt = dealt.argsort()[:PLANS], dealt % PLANS
            x = torch.cat([rows[dealt], acts[dealt], mean.expand(len(dealt), -1)], 1).reshape(self.members, group, -1)
            rows = rows + self.predict(x).reshape(len(dealt), -1)[back][:, :-1]
        worlds = mean + (0.5 * log_var).exp() * torch.randn(self.latents, mean.shape[0])
        shape = (self.members, self.latents, PLANS)
        rows, total = obs.expand(*shape, -1), torch.zeros(shape)
        latents = worlds[None, :, None].expand(*shape, -1)
        for h, acts in enumerate(proposals):
            x = torch.cat([rows, acts.expand(*shape, -1), latents], -1).reshape(self.members, self.latents * PLANS, -1)
            change = self.predict(x).reshape(*shape, -1)
            rows, total = rows + change[..., :-1], total + discount**h * change[..., -1]
        total = total + discount**self.horizon * self.value(rows.reshape(-1, OBS)).reshape(shape)
        scores = total.mean(0) - penalty * total.std(0, correction=0)
        weights = torch.softmax(kappa * scores, dim=1)
        return (weights.mean(0)[:, None] * proposals[0]).sum(0), memory


def measure(name: str, horizon: int, latents: int, members: int) -> dict:
    value_net, shortlist = OURS[name]
    settings = {"horizon": horizon, "latents": latents, "plans": PLANS, "shortlist": shortlist}
    planner = RefPlan(make_prior(value_net), make_model(members), **settings)
    theirs = TorchPlanner(planner)
    obs = jr.normal(jr.key(0), (1, OBS))
    step = Transition(obs, jnp.zeros((1, ACT)), jnp.zeros(1), obs, jnp.zeros(1, bool))
    args = (planner, start_many(planner, 1), step, jr.split(jr.key(1), 1))
    inputs = (torch.zeros(256), torch.from_numpy(np.array(obs[0])), torch.zeros(ACT), torch.zeros(1))
    pairs = np.array(
        [
            (
                median_seconds(lambda: jax.block_until_ready(decide(*args)), 10),
                median_seconds(lambda: theirs.act(*inputs), 10),
            )
            for _ in range(ROUNDS)
        ]
    )
    ours, other = 1e3 * np.median(pairs, axis=0)
    return {
        "what": name, **settings, "members": members,
        "refplan_ms": float(ours), "torch_ms": float(other), "speedup": float(np.median(pairs[:, 1] / pairs[:, 0])),
    }  # fmt: skip


def run() -> list[dict]:
    torch.set_num_threads(2)
    return [measure(name, *shape) for name in OURS for shape in SHAPES]
