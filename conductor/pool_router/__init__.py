"""The global router, which chooses a pool of workers for each request by its length and targets; see ``main``."""
