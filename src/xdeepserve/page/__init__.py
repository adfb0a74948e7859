"""A page to watch a pod on: what it is told, as data (`parts`), who looks (`pod_look`, `step_look`), when
(`watch`), and the page itself (`static/`).

The engine knows nothing of it. Somebody who watches is told what can be looked up at that moment, and one
step now and then, drawn by the pod's trace. docs/page.md is the data's format.
"""
