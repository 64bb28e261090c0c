"""Every learner of the registries with settings small enough to train in milliseconds, for the contract tests."""

from refplan.priors.bc import BC
from refplan.priors.cql import CQL
from refplan.priors.edac import EDAC
from refplan.priors.iql import IQL
from refplan.priors.sac import SAC

_SMALL = {"hidden": (8, 8), "batch_size": 16}

ALL_PRIORS = {
    "bc": BC(**_SMALL),
    "iql": IQL(**_SMALL),
    "cql": CQL(samples=2, penalty_states=8, sac=SAC(**_SMALL, entropy_in_backup=False)),
    "edac": EDAC(sac=SAC(**_SMALL, critics=3)),
}
# Names of settings that are numbers inside the compiled program: changing one must not compile again.
SWEPT = {
    "bc": {"rate": 1e-2},
    "iql": {"rate": 1e-2, "expectile": 0.9, "beta": 1.0, "discount": 0.9, "tau": 0.1},
    "cql": {"weight": 1.0, "gap": 2.0, "sac.actor_rate": 1e-2, "sac.discount": 0.9, "sac.alpha_start": 0.1},
    "edac": {"eta": 5.0, "sac.critic_rate": 1e-2, "sac.alpha_rate": 1e-2, "sac.tau": 0.1},
}
