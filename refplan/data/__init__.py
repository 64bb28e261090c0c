"""Logged data and the worlds it came from: load, check, split, sample; tasks, changed worlds, start states."""
