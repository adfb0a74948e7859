"""What `xdeepserve eval` measures: language modelling and tasks, per domain of held-out text, per recipe."""
