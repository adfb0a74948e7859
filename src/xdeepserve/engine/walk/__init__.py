"""Walk of a Program on a die: the order of stages, their prices, and the ends of exchanges.

- `runner` launches stages in order, and makes exchanges where they stand
- `schedule` decides the order: serial, away and back, or two microbatches that overlap
- `launcher` tells when the host has launched a die's stages
- `ends` are records of what a die calls in exchanges; `engine/ways` makes them
- `timeline` is the pace of dies that only take time: what they have spent and not yet waited for
- `tally` counts how many tokens an exchange carries in all
"""
