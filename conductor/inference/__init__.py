"""What HTTP and gRPC share: requests checked and made ready, their sequences as text, the calls under way, limits."""
