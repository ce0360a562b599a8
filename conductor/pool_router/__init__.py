"""The global router: which pool of workers serves a request, by its length and its targets; see ``main``."""
