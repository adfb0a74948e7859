"""FlowServe: requests, schedulers, die programs and deployments."""
