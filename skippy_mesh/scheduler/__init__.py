"""Who runs in the next step: pure decisions on plain numbers, standard library only.

Read ``scheduler.py`` first. Nothing here knows a clock, a thread, a model or a machine, so every
rule can be tested in microseconds.
"""
