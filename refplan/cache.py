"""Where downloads and compiled programs are kept between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$REFPLAN_CACHE`, else the user's cache folder."""
    if chosen := os.environ.get("REFPLAN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refplan"
