"""Who may do what, and how it is shown: credentials, tenants and the rights of tokens, TLS."""
