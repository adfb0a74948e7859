"""Walk of a Program on a die: the order of stages, their prices, and the ends of exchanges.

- `runner` launches stages in order, and makes exchanges where they stand
- `schedule` decides the order: serial, away and back, or two microbatches that overlap
- `launcher` tells when the host has launched a die's stages
- `group_end` is a die's end of a group of dies that share projections
- `tally` counts how many tokens an exchange carries in all
"""
