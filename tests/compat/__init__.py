"""Interfaces of other projects over our store."""
