"""Server around all routes: keys, limits, log, metrics, errors, and its description of itself."""
