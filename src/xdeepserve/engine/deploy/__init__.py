"""Deployments as data: the settings asked for, the kinds of TEs, and the sizes that follow for a model.

deployment        the structs of all settings, as a TOML file or a preset gives them, with bounds and meanings
resolve           reads a preset or a file, with overrides, into a deployment
roles             a row for each kind of TE: what it runs, its defaults, which settings it has
rules             rows: which kinds have a setting, which settings exclude each other, which change nothing
refusals          finds what a model does not allow; `expert_services` finds errors in expert servers
teams             the TEs of a deployment and their dies
fitting           fits each TE to a model; all errors end up in one exception
sizes             the numbers that a fitted TE is built from
scale_down        a TE on fewer dies, after a failure
settings          the list of all settings, and their values in a deployment
"""
