"""Table of the endpoint's routes, and the fields of requests that they take."""
