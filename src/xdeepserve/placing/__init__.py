"""Several computers under Ray: it places processes, and starts them again. Protocols go other ways."""
