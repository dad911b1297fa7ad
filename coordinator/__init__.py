"""Who runs where and who gets in: the only code that starts actors."""
