"""How long a decode step takes: three answers, each tested against the next (`tests/prices`).

- `run`: a step of a timing-only pod, which every other answer has to meet
- `table`: what such runs take by rows, between the rows that were run: `profile` has the stages of a layer on
  any number of dies, `step_price` a whole step of a TE by its counts
- `formula`: the stages of a layer added up, without a run
"""
