"""Making datasets: rollouts of a policy, and an online SAC run whose buffer and snapshots give the five D4RL kinds."""
