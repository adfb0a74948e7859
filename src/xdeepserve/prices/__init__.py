"""How long a decode step takes: three answers, each tested against the next (`tests/prices`).

- `step_run`: a step of a timing-only pod, which every other answer has to meet
- `curve`: tables of such runs, with lines between the points that were run. `profile` has the stages of a
  layer by rows and by the number of dies, `step_price` whole steps of a TE by their counts
- `formula`: the stages of a layer added up, without a run
"""
