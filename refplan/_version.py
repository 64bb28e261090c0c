"""The version, in one place: hatchling and `refplan --version` both read it."""

__version__ = "0.1.0"
