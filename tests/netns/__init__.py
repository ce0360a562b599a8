"""Tests across network namespaces with several shaped links."""
