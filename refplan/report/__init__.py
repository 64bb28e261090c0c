"""Figures and tables from what was measured; everything is redrawn from CSV."""
