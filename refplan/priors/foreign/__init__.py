"""Readers for policies that other libraries trained; `refplan.priors.external` is their front door."""
