"""Run `xdeepserve learn`: a course whose exercises pass only if every bit is equal.

- `exercise`: the parts of an exercise; `course`: all exercises, in order; `lessons/`: their stories and
  skeletons
- `working_folder`: the learner's files and progress
- `scenes`: the pods, operators and forward passes in which an exercise's function works
- `by_hand`: calls with arguments made by hand, for what the scenes do not reach
- `stand_in`: the learner's function in the place of the package's own, compared with it call by call
- `differences`: the first differing bit, in the words of the protocol
- `trial`: one check; `trial_process`: the same in a separate process, which ends even if the function loops
"""
