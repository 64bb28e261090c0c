"""Learned models of the world, with their own doubt about it."""
