"""Whole lines of work, from data to results, each stage kept and never made twice."""
