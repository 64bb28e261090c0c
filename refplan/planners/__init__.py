"""Planners: they weigh a prior's proposals by what a model says they would earn."""
