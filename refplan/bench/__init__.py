"""Timings a user can repeat: read ratios, not seconds."""
