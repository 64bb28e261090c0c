"""Models that train in seconds, most of them compilation."""

from refplan.dynamics.belief import BeliefModel

SMALL_BELIEF = BeliefModel(
    embed=(4, 4, 2),
    memory=8,
    latent=2,
    members=3,
    elites=2,
    hidden=(8, 8),
    lanes=4,
    length=10,
    beliefs=3,
    past=4,
    epochs=2,
    decoder_epochs=2,
    decoder_batch=16,
)
