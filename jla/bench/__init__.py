"""Ops timed at named shapes: the cases of ``jla bench``, of the benchmarks and of tests."""
