"""Interfaces of other projects over tanghulu, for programs written against those; nothing else imports them."""
