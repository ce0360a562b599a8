"""A whole store in virtual time, a fuzzer of a real one, and the tests that run them."""
