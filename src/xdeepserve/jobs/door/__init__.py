"""Doors of jobs: routes of the endpoint, the desk that runs jobs, and the front door of a cluster."""
