"""Walk of a Program on a die: the order of stages, their prices, and the ends of exchanges.

- `runner`: stages launched in order, exchanges made where they stand
- `schedule`: whose turn it is: serial, away and back, two microbatches that overlap
- `launcher`: when the host has launched what the die is about to run
- `group_end`: a die's end of a DP group that spans several dies
- `tally`: how many tokens an exchange carries in all
"""
