"""Tests of SGLang's connector: against its interface as recorded, and in its own environment against the real one."""
