"""A Program walked on one die: whose stage is next, what it costs, who is at the other end of an exchange.

- `runner`: stages launched in order, exchanges made where they stand
- `schedule`: whose turn it is: serial, away and back, two microbatches that overlap
- `launcher`: when the host has launched what the die is about to run
- `group_end`: a die's end of a DP group that spans several dies
- `tally`: how many tokens an exchange carries in all
"""
