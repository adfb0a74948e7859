"""`xdeepserve learn`: a course whose pass mark is bit equality.

- `exercise`: what an exercise is; `course`: all of them, in order; `lessons/`: their stories and skeletons
- `working_folder`: what the learner has of them, and how far they are
- `scenes`: the pods, operators and forward passes that an exercise's function is a part of
- `stand_in`: the learner's function in the place of the package's own, call by call compared with it
- `differences`: the first bit that is another, in the words of the protocol
- `trial`: one check; `trial_process`: the same in a process of its own, which an endless loop cannot outlive
"""
