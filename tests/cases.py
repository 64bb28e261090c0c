"""Every learner of the registries with settings small enough to train in milliseconds, for the contract tests."""

from imagined import tiny_ensemble

from refplan.priors.bc import BC
from refplan.priors.combo import COMBO
from refplan.priors.cql import CQL
from refplan.priors.edac import EDAC
from refplan.priors.imagining import Imagination
from refplan.priors.iql import IQL
from refplan.priors.maple import MAPLE
from refplan.priors.mbop import MBOP
from refplan.priors.mopo import MOPO
from refplan.priors.sac import SAC

_SMALL = {"hidden": (8, 8), "batch_size": 16}
_CQL = CQL(samples=2, penalty_states=8, sac=SAC(**_SMALL, entropy_in_backup=False))
# Rounds of imagination at updates 0, 2 and 4, of which the ring holds two.
_ROUNDS = {"starts": 12, "length": 3, "refresh": 2, "retain": 2}
_WORLD = tiny_ensemble()

ALL_PRIORS = {
    "bc": BC(**_SMALL),
    "mbop": MBOP(steps=3, members=2, **_SMALL),
    "iql": IQL(**_SMALL),
    "cql": _CQL,
    "edac": EDAC(sac=SAC(**_SMALL, critics=3)),
    "mopo": MOPO(_WORLD, imagined=Imagination(**_ROUNDS, real_ratio=0.25), sac=SAC(**_SMALL)),
    "combo": COMBO(_WORLD, imagined=Imagination(**_ROUNDS, real_ratio=0.5), cql=_CQL),
    "maple": MAPLE(
        _WORLD,
        memory=6,
        context=3,
        imagined=Imagination(**_ROUNDS, real_ratio=0.25, one_member=True),
        sac=SAC(**_SMALL),
    ),
}
# Names of settings that are numbers inside the compiled program: changing one must not compile again.
SWEPT = {
    "bc": {"rate": 1e-2},
    "mbop": {"rate": 1e-2},
    "iql": {"rate": 1e-2, "expectile": 0.9, "beta": 1.0, "discount": 0.9, "tau": 0.1},
    "cql": {"weight": 1.0, "gap": 2.0, "sac.actor_rate": 1e-2, "sac.discount": 0.9, "sac.alpha_start": 0.1},
    "mopo": {"penalty": 5.0, "sac.critic_rate": 1e-2, "sac.discount": 0.9},
    "combo": {"cql.weight": 5.0, "cql.sac.actor_rate": 1e-2, "cql.sac.tau": 0.1},
    "maple": {"penalty": 5.0, "penalty_most": 1e-3, "sac.actor_rate": 1e-2, "sac.discount": 0.9, "sac.tau": 0.1},
    "edac": {"eta": 5.0, "sac.critic_rate": 1e-2, "sac.alpha_rate": 1e-2, "sac.tau": 0.1},
}
