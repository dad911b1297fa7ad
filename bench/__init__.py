"""Honest numbers: ``python -m bench COMMAND`` (METHODOLOGY.md says how, RESULTS.md what)."""
