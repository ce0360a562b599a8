"""Dispatch: the path of a request from acceptance to its last token: queue, admission, worker sessions, moves."""
