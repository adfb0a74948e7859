"""Deployments as data: what is asked for, what each kind of team of dies can be, and the numbers that follow.

deployment   what a TOML file or a preset says, and the meaning of every setting
resolve      from a preset or a file, with overrides, to a deployment
roles        a row for each kind of team: what it runs, its defaults, which settings it has
rules        which kinds have a setting, which exclude each other, which change nothing: rows
refusals     what a model or the dies of a TE do not allow; all reasons end up in one error
teams        the TEs of a deployment and their dies
sizes        each of them fitted to a model: the numbers that it is built from
settings     the list of all settings
"""
