"""Policies learned from data, and policies brought from elsewhere."""
