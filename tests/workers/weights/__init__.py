"""Tests of model files and tokenizers."""
