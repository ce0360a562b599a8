"""Contract suites: tests that several implementations pass, imported by a test module of each."""
