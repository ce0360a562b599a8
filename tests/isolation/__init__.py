"""Who may do what, of every method of every entry point, on running clusters: the table and its mutations."""
