"""Evaluations of `xdeepserve eval`: language modelling and tasks, per domain of held-out text, per recipe."""
