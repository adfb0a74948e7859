"""Serve a page to watch a pod on.

- `parts`: the page's data
- `pod_look`, `step_look`: read the data from an engine
- `watch`: when the engine is looked at, and for whom
- `static/`: the page itself

The engine does not know about the page. A watcher gets the state of the moment, and now and then a step drawn
by the pod's trace. docs/page.md is the data's format.
"""
