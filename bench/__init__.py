"""Honest numbers: ``python -m bench stage|sweep`` (RESULTS.md holds what they printed)."""
