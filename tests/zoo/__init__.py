"""Tiny random checkpoints, one builder a kind: small enough to load in a second, whole enough to run.

`zoo.kinds.KINDS` is the register of them all.
"""
