"""Dispatch: a request's way from acceptance to its last token: queue, admission, workers' sessions, moves."""
