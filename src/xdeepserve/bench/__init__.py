"""`xdeepserve bench`: measured or modelled values, beside the papers' published values.

- `papers`: virtual time and formulas, beside what the papers publish or say in words
- `wall`: what is measured on this computer
- `command`, `report`, `meanings`: the suites by name, their rows, and what groups of rows mean
"""
