"""Authentication and authorisation: credentials, tenants and the rights of tokens, TLS."""
